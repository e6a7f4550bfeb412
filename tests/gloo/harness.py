"""Runs a function on several gloo ranks, each its own process, and brings back what they return."""

import fcntl
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moefold.comm.environment import Spot
from moefold.comm.launch import RankError, all_answers

__all__ = ["RankError", "run_ranks", "run_spots"]

TIME_OUT_S = 30.0


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, time_out_s: float = TIME_OUT_S
) -> list[Any]:
    """Call ``function(rank, *args)`` on each of ``world`` ranks; return the answers in rank order.

    ``function`` and what it returns must be picklable (a function at the top of its file). The
    first rank that fails ends the others: after a failed collective they would only wait.
    """
    return run_spots(_by_rank, world, function, *args, time_out_s=time_out_s)


def run_spots(
    function: Callable[..., Any], world: int, *args: Any, time_out_s: float = TIME_OUT_S
) -> list[Any]:
    """Do the same for a ``function(spot, *args)``.

    Runs take turns on a machine, so that parallel test workers do not eat into each other's time.
    """
    with _one_at_a_time():
        task = (function, *args)
        return all_answers(_strictly, world, task, time_out_s, limit_s=2 * time_out_s)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock_file = Path(tempfile.gettempdir()) / f"moefold-test-ranks-{os.getuid()}.lock"
    with lock_file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _strictly(spot: Spot, function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("error")
    return function(spot, *args)


def _by_rank(spot: Spot, function: Callable[..., Any], *args: Any) -> Any:
    return function(spot.rank, *args)
