"""Elastic launch: restarts all ranks of this machine when one is lost.

A rank is lost when its process dies, or when an operation between ranks fails without an error of
any rank's own. The launcher then kills and restarts all ranks, which resume from state that they
wrote into memory held by the launcher. A rank that was only stopped is woken.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from moefold.comm.config import Survive
from moefold.comm.interrupt import SILENT, Words
from moefold.comm.launch import TIME_OUT_S, RankError, RankLost, Workers, as_one_process, forwarding
from moefold.comm.worker import ATTEMPTS, BEATS, STEPS, Attempt, Loss, RankMemory


def launch_elastic(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    record: Survive,
    time_out_s: float = TIME_OUT_S,
    device: str = "cpu",
    words: Words = SILENT,
) -> Any:
    """Call ``function(spot, attempt, *args)`` on ranks of this machine; return rank 0's result.

    When ranks are lost, all are restarted and the function is called again; it must resume from
    what it wrote into ``attempt.memory``. Otherwise like :func:`moefold.comm.launch.launch`.

    Raises:
        ValueError, OSError: a rank's own error, if it is one of these.
        RankError: for a rank's other errors, or after too many losses.
        KeyboardInterrupt: if the ranks ended after an interrupt.
    """
    memories = [RankMemory.create() for _ in range(nproc)]
    limit, loss = RestartLimit(record, memories), None
    running: list[Workers] = []

    def hand_on(number: int) -> None:
        for workers in running:
            workers.hand_on(number)

    with ExitStack() as closing:
        for memory in memories:
            closing.callback(memory.close)
        closing.enter_context(as_one_process())
        received = closing.enter_context(forwarding(hand_on, words))
        for number in count():
            attempts = [Attempt(memory, number, loss) for memory in memories]
            given = [(attempt, *args) for attempt in attempts]
            workers = Workers(function, given, time_out_s, device, attempts)
            running[:] = [workers]
            try:
                workers.start()
                for asked in set(received):
                    workers.signal(asked)
                answers = workers.answers(silent=limit.silence())
                workers.leave()
                return answers[0]
            except RankLost as lost:
                done = [answer for answer in lost.answers if answer and answer.ok]
                if done:  # The work is done; a rank that died since had nothing left to do.
                    return done[0].value
                loss = Loss(lost.ranks, lost.why, time.time())
                if len(set(received)) < len(received) or (received and not limit.in_step):
                    raise  # Interrupted twice, or before there was any state to save.
                limit.add(lost.why)
            finally:
                workers.end()
    raise AssertionError("attempts go on until one returns or raises")


class RestartLimit:
    """Counts losses of ranks, and gives up after too many.

    Args:
        record: the limits.
        memories: each rank's memory, read for its counters.
    """

    def __init__(self, record: Survive, memories: Sequence[RankMemory]) -> None:
        self._record, self._memories = record, memories
        self._times: deque[float] = deque()
        self._in_a_row, self._last = 0, -1

    @property
    def in_step(self) -> bool:
        """Whether any rank has stored state in any attempt."""
        return any(memory.counters[ATTEMPTS] for memory in self._memories)

    def silence(self) -> Callable[[], list[int]]:
        """Return a function to poll for the ranks of a new attempt without heartbeat.

        It returns a rank again after each further ``stopped_s`` of silence.
        """
        beats = [memory.counters[BEATS] for memory in self._memories]
        heard = [time.monotonic()] * len(beats)

        def silent() -> list[int]:
            now = time.monotonic()
            for rank, memory in enumerate(self._memories):
                if memory.counters[BEATS] != beats[rank]:
                    beats[rank], heard[rank] = memory.counters[BEATS], now
            found = [at for at, last in enumerate(heard) if now - last > self._record.stopped_s]
            for rank in found:
                heard[rank] = now
            return found

        return silent

    def add(self, why: str) -> None:
        """Count a loss.

        Raises:
            RankError: if losses are too frequent, or recur at one step.
        """
        now, record = time.monotonic(), self._record
        self._times.append(now)
        while now - self._times[0] > record.window_s:
            self._times.popleft()
        steps = min(memory.counters[STEPS] for memory in self._memories)
        self._in_a_row = self._in_a_row + 1 if steps == self._last else 1
        self._last = steps
        what = ""
        if self._in_a_row >= record.same_step:
            done = f"after step {steps - 1}" if steps else "before the first step"
            what = f"ranks were lost {self._in_a_row} times in a row {done}"
        elif len(self._times) > record.limit:
            what = f"ranks were lost {len(self._times)} times within {record.window_s:g} s"
        if what:
            raise RankError(
                f"{why}; {what}, too often for watch.survive. Find the cause (memory, the "
                "device, the data of this step), then repeat the command with --folder to resume "
                "from the newest checkpoint"
            )
