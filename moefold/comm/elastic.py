"""Ranks of this machine that are started anew, all of them, when one is lost.

A rank is lost when its process dies, or when an operation between ranks fails and none of them is
to blame. The launcher then ends all ranks and starts them again. What they go on from they have
written into memory that the launcher holds. A rank that was only stopped is woken.
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

    When ranks are lost all are ended and started anew, and the function is called again. It is
    then to go on from what it wrote into ``attempt.memory``. Otherwise as ``launch``.

    Raises:
        ValueError, OSError: what a rank raised that failed by itself, where it is one of these.
        RankError: with its error where it is another, or once too many were lost.
        KeyboardInterrupt: where the ranks ended after an interrupt.
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
                if done:  # The work is done: who died since has nothing left to do.
                    return done[0].value
                loss = Loss(lost.ranks, lost.why, time.time())
                if len(set(received)) < len(received) or (received and not limit.in_step):
                    raise  # It was asked to end at once, or before there was anything to save.
                limit.add(lost.why)
            finally:
                workers.end()
    raise AssertionError("attempts go on until one returns or raises")


class RestartLimit:
    """Sees the ranks' counters and how often ranks were lost, and gives up when that is too often.

    Args:
        record: when it is.
        memories: of each rank.
    """

    def __init__(self, record: Survive, memories: Sequence[RankMemory]) -> None:
        self._record, self._memories = record, memories
        self._times: deque[float] = deque()
        self._in_a_row, self._last = 0, -1

    @property
    def in_step(self) -> bool:
        """Whether any rank was in step in any attempt."""
        return any(memory.counters[ATTEMPTS] for memory in self._memories)

    def silence(self) -> Callable[[], list[int]]:
        """Return what says, asked again and again, which ranks of a new attempt are silent.

        One that stays silent is told of once in ``stopped_s``.
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
            RankError: where losses come too often, or again and again at one step.
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
            done = f"after step {steps - 1}" if steps else "before any step"
            what = f"the loss number {self._in_a_row} in a row {done}"
        elif len(self._times) > record.limit:
            what = f"the loss number {len(self._times)} within {record.window_s:g} s"
        if what:
            raise RankError(
                f"{why}; {what}. Starting it once more would only repeat that: look for its "
                "cause (memory, the device, the data of this step), then give the same command "
                "with --folder, which goes on from the newest checkpoint. Limits: watch.survive"
            )
