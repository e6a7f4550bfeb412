"""Runs a function on several gloo ranks, each its own process, and brings back what they return."""

import fcntl
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from moefold.comm.environment import RankInfo
from moefold.comm.fork_server import PRELOAD
from moefold.comm.launch import RankError, launch_all
from moefold.layers.config import CHECKPOINTING
from moefold.run import load_run

__all__ = ["RankError", "Reference", "load_in_fork_server", "one_at_a_time", "run_ranks"]

TIME_OUT_S = 30.0
Given, Result = ParamSpec("Given"), TypeVar("Result")


class Reference(Generic[Given, Result]):
    """A function at the top of its file, computed once for the same arguments.

    What the test's process has computed, ``run_ranks`` hands to the ranks: each would otherwise
    compute what one rank gets for itself.
    """

    def __init__(self, function: Callable[Given, Result]) -> None:
        self.function = function
        self.known: dict[Any, Result] = {}
        update_wrapper(self, function)

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Result:
        """Return the function's result."""
        assert not named
        if given not in self.known:
            self.known[given] = self.function(*given, **named)
        return self.known[given]

    def __reduce__(self) -> str:
        """Be found by name in another process."""
        return self.function.__name__


def load_in_fork_server() -> None:
    """Let the server that ranks fork from load all of ours that this process has loaded.

    A rank that imports the package and its test by itself takes a second of processor time for it.
    """
    load_run("tiny")  # imports all kinds of each part
    ours = [name for name in sys.modules if name.startswith(("moefold.", "tests.gloo."))]
    PRELOAD.extend([*CHECKPOINTING, "pytest", *sorted(ours)])


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    time_out_s: float = TIME_OUT_S,
    references: Sequence[Reference[Any, Any]] = (),
) -> list[Any]:
    """Call ``function(rank, *args)`` on each of ``world`` ranks; return the answers in rank order.

    ``function`` and what it returns must be picklable (a function at the top of its file). The
    first rank that fails ends the others: after a failed collective they would only wait.
    ``references`` have on the ranks the results that they have here.
    """
    known = io.BytesIO()
    torch.save([reference.known for reference in references], known)
    with one_at_a_time():
        task = (references, known.getvalue(), function, *args)
        return launch_all(_by_rank, world, task, time_out_s, limit_s=2 * time_out_s)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Take turns on a machine, so that test workers do not eat into each other's time."""
    lock_file = Path(tempfile.gettempdir()) / f"moefold-test-ranks-{os.getuid()}.lock"
    with lock_file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _by_rank(
    info: RankInfo,
    references: Sequence[Reference[Any, Any]],
    known: bytes,
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    warnings.simplefilter("error")
    results = torch.load(io.BytesIO(known), weights_only=False)
    for reference, found in zip(references, results, strict=True):
        reference.known.update(found)
    return function(info.rank, *args)
