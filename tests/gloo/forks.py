"""Ranks as forks of the test's own process: started in a moment, and killed without regret."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.comm.environment import RankInfo
from moefold.comm.group import Group
from moefold.comm.recorder import Recorder
from moefold.comm.rendezvous import join, serve

WAIT_S = 60.0
CPU = torch.device("cpu")


def fork_ranks(function: Callable[[Group], None], world: int, folder: Path) -> list[int]:
    """Call ``function(all ranks)`` in each of ``world`` forks; return their exit statuses.

    A negative status is the signal that ended a rank. ``folder`` is where they meet.
    """
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread here holds a lock
        pids = [_forked(function, rank, world, meeting) for rank in range(world)]
    statuses, until = {}, time.monotonic() + WAIT_S
    while len(statuses) < world:
        for pid in pids:
            found, status = (0, 0) if pid in statuses else os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    meeting.unlink(missing_ok=True)
    return [statuses[pid] for pid in pids]


def _forked(function: Callable[[Group], None], rank: int, world: int, meeting: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _store, served = serve("127.0.0.1", 0, WAIT_S) if rank == 0 else (None, None)
        port = _port(meeting, served)
        join(RankInfo(rank, world, rank, "127.0.0.1", port, store_running=True), WAIT_S / 2)
        function(Group("world", tuple(range(world)), rank, dist.group.WORLD, Recorder()))
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _port(meeting: Path, mine: int | None) -> int:
    """Tell the other ranks the port that the store is at, or wait until the first one tells."""
    if mine is not None:
        part = meeting.with_suffix(".part")
        part.write_text(str(mine))
        part.rename(meeting)
    until = time.monotonic() + WAIT_S / 2
    while not meeting.exists():
        assert time.monotonic() < until, "the first rank serves no store"
        time.sleep(0.002)
    return int(meeting.read_text())
