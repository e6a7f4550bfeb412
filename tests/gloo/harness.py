"""Runs a function on several gloo ranks, each its own process, and brings back what they return."""

import fcntl
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moefold.comm.environment import Spot
from moefold.comm.launch import RankError, all_answers
from moefold.comm.worker import PRELOAD

__all__ = ["RankError", "load_in_fork_server", "one_at_a_time", "run_ranks"]

TIME_OUT_S = 30.0


def load_in_fork_server() -> None:
    """Let the server that ranks fork from load all of ours that this process has loaded.

    A rank that imports the package and its test by itself takes a second of processor time for it.
    """
    ours = [name for name in sys.modules if name.startswith(("moefold.", "tests.gloo."))]
    PRELOAD.extend(["pytest", *sorted(ours)])


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, time_out_s: float = TIME_OUT_S
) -> list[Any]:
    """Call ``function(rank, *args)`` on each of ``world`` ranks; return the answers in rank order.

    ``function`` and what it returns must be picklable (a function at the top of its file). The
    first rank that fails ends the others: after a failed collective they would only wait.
    """
    with one_at_a_time():
        task = (function, *args)
        return all_answers(_by_rank, world, task, time_out_s, limit_s=2 * time_out_s)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Take turns on a machine, so that test workers do not eat into each other's time."""
    lock_file = Path(tempfile.gettempdir()) / f"moefold-test-ranks-{os.getuid()}.lock"
    with lock_file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _by_rank(spot: Spot, function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("error")
    return function(spot.rank, *args)
