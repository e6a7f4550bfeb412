"""Ranks of a run: devices, groups, stop signals, and calls that rank 0's hooks make on all."""

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
from moefold.comm.agree import FirstRankFailed, broadcast_from_first
from moefold.comm.environment import RankInfo
from moefold.comm.interrupt import FORWARDED_SIGNALS, NO_MESSAGES, Messages, write_stderr
from moefold.comm.rendezvous import cuda_device
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.run import Run, require_fit
from moefold.training.hooks.base import JobView

HANG_REPORTS_FOLDER = "hangs"
"""Subfolder of the run folder for the reports that ranks write when communication hangs."""
MESSAGES = Messages(
    "saving after this step; Ctrl-C again to stop now",
    "stopped; the steps since the last checkpoint are lost",
)


def device_kind(ranks_here: int = 1) -> str:
    """Return ``cuda`` if a CUDA device is available, else ``cpu``.

    Raises:
        ValueError: if ranks of this machine would have to share a device.
    """
    if not torch.cuda.is_available():
        return "cpu"
    devices = torch.cuda.device_count()
    if ranks_here > devices:
        raise ValueError(
            f"{ranks_here} ranks and {devices} CUDA devices here; start at most {devices}, or run "
            "on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return "cuda"


def open_world(run: Run, info: RankInfo, folder: Path) -> World:
    """Open the run's layout over all ranks, which have joined the rendezvous.

    Raises:
        RunError: if the layout does not fit so many ranks; names the nearest that does.
    """
    require_fit(run, info.world_size)
    folding = Folding(run.layout.split, info.world_size, run.layout.order)
    device = cuda_device(info) if device_kind() == "cuda" else torch.device("cpu")
    return World.open(folding, device, run.watch.time_out_s, folder / HANG_REPORTS_FOLDER)


def single_rank(run: Run) -> World:
    """Open the run's layout over this process alone.

    Raises:
        RunError: if the layout needs more ranks; names the nearest that does not.
    """
    require_fit(run, 1)
    return World.single(torch.device(device_kind()))


class RankZeroRunner:
    """Runs hooks on rank 0, and on all ranks the methods that the hooks call.

    While rank 0 calls its hooks for an event, the others wait. If a hook calls a method of the
    trainer that every rank must run (an evaluation, a checkpoint), rank 0 broadcasts its name and
    arguments, small data that JSON can hold, and all ranks run it; then the hooks continue. A hook
    is therefore written for one process and works on thousands.
    """

    def __init__(self, world: World, job: JobView) -> None:
        self._ranks = world.on_host
        self._job = job
        self._leading = False

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which runs the hooks."""
        return self._ranks.index == 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method on all ranks: broadcast by rank 0 inside ``lead``; elsewhere all call it."""
        was_leading = self._leading
        self._leading = False
        try:
            if was_leading:
                message = {"call": method.__name__, "args": args, "kwargs": kwargs}
                broadcast_from_first(message, self._ranks)
            return method(self._job, *args, **kwargs)
        finally:
            self._leading = was_leading

    def lead(self, function: Callable[[], Any], answer: Callable[[], Any]) -> Any:
        """Run ``function`` on rank 0 while others serve its calls; return rank 0's ``answer()``.

        Raises:
            Exception: on rank 0, what the function raised.
            FirstRankFailed: on the other ranks if it raised.
        """
        while not self.is_leader:
            message = broadcast_from_first(None, self._ranks)
            if "error" in message:
                raise FirstRankFailed(f"the first rank failed: {message['error']}")
            if "answer" in message:
                return message["answer"]
            with suppress(SaveError):  # It is raised on rank 0 too, which decides.
                getattr(self._job, message["call"])(*message["args"], **message["kwargs"])
        was_leading = self._leading
        self._leading = True
        try:
            function()
        except BaseException as error:
            broadcast_from_first({"error": f"{type(error).__name__}: {error}"}, self._ranks)
            raise
        finally:
            self._leading = was_leading
        return broadcast_from_first({"answer": answer()}, self._ranks)["answer"]


P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method to run on all ranks, also if only a hook on rank 0 calls it.

    Its object needs a ``RankZeroRunner`` as ``rank_zero``; arguments are small data for JSON.
    """

    @wraps(method)
    def call_on_all_ranks(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.rank_zero.call(method, *args, **kwargs)

    return call_on_all_ranks


@contextmanager
def stop_on_signals(job: JobView) -> Iterator[None]:
    """Turn the first signal of a kind into a request to stop; a second one ends the process.

    A second Ctrl-C raises ``KeyboardInterrupt``. Rank 0 confirms Ctrl-C to the user, unless
    moefold's launcher does.
    """
    messages = MESSAGES if job.world.rank == 0 and parent_process() is None else NO_MESSAGES
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        job.request_stop(f"received {signal.Signals(number).name}")
        signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
        if number == signal.SIGINT and messages.first:
            write_stderr(messages.first)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(messages.second)

    previous_handlers = {n: signal.signal(n, request_stop) for n in FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            # None: a handler that Python did not install and cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
