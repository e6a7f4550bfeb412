"""Ranks of a run: devices, groups, signals that stop it, and what rank 0's hooks start on all."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from moefold.checkpoint.errors import SaveError
from moefold.comm.agree import FirstFailed, told_by_first
from moefold.comm.environment import Spot
from moefold.comm.interrupt import FORWARDED, SILENT, Words, say
from moefold.comm.rendezvous import cuda_device
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.run import Run, demand_fit
from moefold.training.hooks.base import JobView

REPORTS = "hangs"
"""Folder, in the run's, of what ranks write when they wait in vain for each other."""
WORDS = Words(
    "saving after this step; Ctrl-C again to stop now",
    "stopped; the steps since the last checkpoint are lost",
)


def device_kind(ranks_here: int = 1) -> str:
    """Return ``cuda`` where there is one, else ``cpu``.

    Raises:
        ValueError: where ranks of this machine would have to share a device.
    """
    if not torch.cuda.is_available():
        return "cpu"
    devices = torch.cuda.device_count()
    if ranks_here > devices:
        raise ValueError(
            f"{ranks_here} ranks and {devices} CUDA devices here: start {devices} at most, or run "
            "on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return "cuda"


def world_of(run: Run, spot: Spot, folder: Path) -> World:
    """Open the run's layout over all ranks; each of them has joined.

    Raises:
        RunError: where the layout does not fit so many ranks, with the nearest that does.
    """
    demand_fit(run, spot.world)
    folding = Folding(run.layout.split, spot.world, run.layout.order)
    device = cuda_device(spot) if device_kind() == "cuda" else torch.device("cpu")
    return World.open(folding, device, run.watch.time_out_s, folder / REPORTS)


class RankZeroRunner:
    """Runs hooks on rank 0, and on all ranks what the hooks ask for.

    While rank 0 tells its hooks of an event, the others wait for its word. A hook that asks the
    trainer for something in which every rank takes part (an evaluation, a checkpoint) sends its
    name round, and all do it; then the hooks go on. So a hook is written for one process and works
    on thousands. Arguments of what ``job`` does on all ranks are small data that JSON can hold.
    """

    def __init__(self, world: World, job: JobView) -> None:
        self._ranks, self._job = world.on_host, job
        self._leads = False

    @property
    def leader(self) -> bool:
        """Whether this rank is the one that tells."""
        return self._ranks.index == 0

    def call(self, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Run a method on all ranks: by rank 0's word inside ``lead``, else all come here alike."""
        leads, self._leads = self._leads, False
        try:
            if leads:
                told_by_first({"call": method.__name__, "args": args, "how": how}, self._ranks)
            return method(self._job, *args, **how)
        finally:
            self._leads = leads

    def lead(self, function: Callable[[], Any], answer: Callable[[], Any]) -> Any:
        """Run ``function`` on rank 0 while the others follow; return its ``answer`` on all.

        Raises:
            Exception: on rank 0 what the function raised.
            FirstFailed: on the others.
        """
        while not self.leader:
            said = told_by_first(None, self._ranks)
            if "error" in said:
                raise FirstFailed(f"the first rank failed: {said['error']}")
            if "answer" in said:
                return said["answer"]
            with suppress(SaveError):  # Rank 0 had it too, and says what comes of it.
                getattr(self._job, said["call"])(*said["args"], **said["how"])
        leads, self._leads = self._leads, True
        try:
            function()
        except BaseException as error:
            told_by_first({"error": f"{type(error).__name__}: {error}"}, self._ranks)
            raise
        finally:
            self._leads = leads
        return told_by_first({"answer": answer()}, self._ranks)["answer"]


P = ParamSpec("P")
R = TypeVar("R")


def together(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make a method one that all ranks carry out, also where a hook on rank 0 alone calls it.

    It is one of an object with a ``rank_zero``, and given small data that JSON can hold.
    """

    @wraps(method)
    def called(self: Any, *args: P.args, **how: P.kwargs) -> R:
        return self.rank_zero.call(method, *args, **how)

    return called


@contextmanager
def stopping_on_signals(job: JobView) -> Iterator[None]:
    """Turn the first signal of a kind into a request to stop; a second ends the process at once.

    The first rank answers Ctrl-C, where no launcher of ours does; the second one is a
    ``KeyboardInterrupt``.
    """
    words = WORDS if job.world.rank == 0 and parent_process() is None else SILENT
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        job.request_stop(f"received {signal.Signals(number).name}")
        signal.signal(number, now if number == signal.SIGINT else signal.SIG_DFL)
        if number == signal.SIGINT and words.first:
            say(words.first)

    def now(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(words.second)

    before = {number: signal.signal(number, handle) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
