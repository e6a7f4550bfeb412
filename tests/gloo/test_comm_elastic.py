"""Ranks that die or lose a connection: all are started anew; one that is stopped is woken."""

import ctypes
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from moefold.comm.collectives import gather_objects, sum_
from moefold.comm.config import Survive
from moefold.comm.elastic import launch_elastic
from moefold.comm.environment import RankInfo
from moefold.comm.launch import RankError
from moefold.comm.worker import BEATS, Attempt, RankMemory
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import one_at_a_time

QUICK = Survive(stopped_s=0.6, same_step=4)
LAST = 12
WORD = 8


def counting(
    info: RankInfo, attempt: Attempt, folder: str, fault: str, once: bool = True
) -> list[int]:
    """Add ranks up, step after step; after step 4 something happens to rank 1.

    Returns the steps that each attempt of this rank began at.
    """
    with World.open(Folding(Sizes(), info.world_size), "cpu", 8.0) as world:
        kept = memoryview(attempt.memory.map(WORD * (2 + LAST))).cast("q")
        done = min(gather_objects(kept[0], world.on_host))
        kept[2 + kept[1]] = done
        kept[1] += 1
        attempt.report_stored(done)
        while done < LAST:
            if done == 4 and info.rank == 1 and (attempt.number == 0 or not once):
                (Path(folder) / "fault").touch()
                happen(fault)
            assert sum_(torch.ones(4), world.group("world")).tolist() == [info.world_size] * 4
            done += 1
            kept[0] = done
            attempt.report_stored(done)
        return list(kept[2 : 2 + kept[1]])


def happen(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise LookupError("rank one found nothing")
    elif fault == "network":
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as end:
                listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if end.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    end.shutdown(socket.SHUT_RDWR)


def run(folder: Path, fault: str, ranks: int = 3, once: bool = True) -> list[int]:
    with one_at_a_time():
        given = str(folder), fault, once
        return launch_elastic(counting, ranks, *given, record=QUICK, time_out_s=8)


@pytest.mark.parametrize("fault", ["kill", "network"])
def test_all_go_on_from_the_step_that_all_have(tmp_path: Path, fault: str) -> None:
    assert run(tmp_path, fault) == [0, 4]
    assert time.time() - (tmp_path / "fault").stat().st_mtime < 20


def test_a_rank_that_is_stopped_goes_on_before_the_others_wait_in_vain(tmp_path: Path) -> None:
    assert run(tmp_path, "stop") == [0]


def test_an_error_of_a_rank_itself_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*LookupError: rank one found"):
        run(tmp_path, "raise")


def test_a_loss_again_and_again_at_one_step_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"killed by SIGKILL .*; ranks were lost 4 times in a row"):
        run(tmp_path, "kill", 2, once=False)


def holding(info: RankInfo, attempt: Attempt) -> int:
    """Hold the interpreter for longer than a stopped process may be silent; return the attempt."""
    attempt.report_stored(1)
    before = attempt.memory.counters[BEATS]
    until = time.monotonic() + 8
    while attempt.memory.counters[BEATS] == before:
        assert time.monotonic() < until
        time.sleep(0.02)
    ctypes.PyDLL(None).usleep(int(2e6 * QUICK.stopped_s))
    return attempt.number


def test_a_rank_that_is_only_silent_is_left_to_its_work() -> None:
    """A busy machine lets no thread of a rank run for seconds; CI ended whole runs over that."""
    with one_at_a_time():
        assert launch_elastic(holding, 2, record=QUICK, time_out_s=8) == 0


def stopping(info: RankInfo, attempt: Attempt, launcher: int, folder: str) -> int:
    """Die after a first step; while the ranks start again the launcher is asked to stop.

    Returns the attempt in which a rank heard of it.
    """
    heard: list[int] = []
    if attempt.number:
        if info.rank == 0:
            os.kill(launcher, signal.SIGTERM)
        time.sleep(0.3)  # without a handler: a signal that came through would end the rank
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    attempt.report_stored(1)
    if not attempt.number and info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 8
    while not heard:
        assert time.monotonic() < until
        time.sleep(0.02)
    return attempt.number


def test_a_signal_waits_until_ranks_that_start_again_are_in_step(tmp_path: Path) -> None:
    with one_at_a_time():
        given = os.getpid(), str(tmp_path)
        assert launch_elastic(stopping, 2, *given, record=QUICK, time_out_s=8) == 1


def test_what_is_written_stays_as_long_as_someone_has_it_open() -> None:
    memory = RankMemory.create()
    assert memory.size == 0
    memory.map(2 * WORD)[WORD:] = b"8 bytes!"
    memory.counters[2] = 7
    child = RankMemory(os.dup(memory.file))
    memory.close()
    assert child.counters[2] == 7 and child.size == 2 * WORD
    assert child.map(child.size)[WORD:] == b"8 bytes!"
