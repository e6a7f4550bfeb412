"""What a rank waits for can be left, though gloo never ends it."""

import os
import signal
import threading
import time
import weakref

import pytest
import torch

from moefold.comm.config import Survive
from moefold.comm.environment import Spot
from moefold.comm.plain import receive, send
from moefold.comm.respawn import survive
from moefold.comm.respawn_rank import Line
from moefold.comm.waits import CalledAwayError, Waits
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from tests.gloo.harness import one_at_a_time

TIME_OUT_S = 40.0
LARGE = 8 << 20
"""Values of a message far larger than what the system holds of one under way."""


def sending(line: Line) -> tuple[int, float]:
    """Rank 0 sends rank 1 a message, at the beginning of which that one dies.

    Returns rank 0's attempts, and the seconds from the message to the next attempt.
    """
    begun = [0.0]

    def attempt(spot: Spot) -> tuple[int, float]:
        with World.open(Folding(Sizes(), 2), "cpu", TIME_OUT_S, survives=True) as world:
            if spot.attempt > 0:
                return spot.attempt, time.monotonic() - begun[0]
            ranks, message = world.group("world"), torch.zeros(LARGE)
            begun[0] = time.monotonic()
            if spot.rank == 0:
                send(message, 1, ranks).wait()
            pending = receive(message, 0, ranks)
            os.kill(os.getpid(), signal.SIGSTOP)
            pending.wait()
        raise AssertionError("nothing of this attempt ends well")

    return line.through(attempt)


def test_a_message_under_way_to_a_rank_that_is_lost_holds_nobody_up() -> None:
    record = Survive(stopped_s=0.3)
    with one_at_a_time():
        attempts, seconds = survive(sending, 2, record=record, time_out_s=TIME_OUT_S)
    assert attempts == 1
    assert seconds < TIME_OUT_S / 2


class Endless:
    """A work that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over = threading.Event()
        self.error = error

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.over.wait(30)
        if self.error is not None:
            raise self.error


def done(error: Exception | None = None) -> Endless:
    work = Endless(error)
    work.over.set()
    return work


def test_all_threads_leave_and_may_wait_again() -> None:
    waits, work = Waits(), Endless()
    left: list[CalledAwayError] = []
    waits.may_leave()

    def wait() -> None:
        waits.wait(done())
        try:
            waits.wait(work)
        except CalledAwayError as error:
            left.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    threading.Timer(0.1, waits.leave).start()
    with pytest.raises(CalledAwayError, match="another rank is lost"):
        waits.wait(work)
    for thread in threads:
        thread.join(5)
    assert len(left) == 3
    with pytest.raises(CalledAwayError):
        waits.wait(done())
    waits.may_leave()
    waits.wait(done())
    with pytest.raises(LookupError, match="of the work"):
        waits.wait(done(LookupError("of the work")))
    work.over.set()


def test_nothing_is_held_of_an_operation_that_is_over_nor_a_thread_of_one_that_ended() -> None:
    waits, before = Waits(), waiting()
    waits.may_leave()
    held: list[weakref.ref[Endless]] = []

    def wait() -> None:
        work = done()
        waits.wait(work)
        held.append(weakref.ref(work))

    for _ in range(4):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    until = time.monotonic() + 5
    while waiting() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not waiting() - before
    assert not any(work() for work in held)


def waiting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "waits"}


def test_a_process_that_nobody_calls_away_waits_on_its_own_thread() -> None:
    waits, seen = Waits(), []

    class Here(Endless):
        def wait(self) -> None:
            seen.append(threading.current_thread())

    waits.wait(Here())
    assert seen == [threading.current_thread()]
