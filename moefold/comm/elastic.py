"""Elastic launch: restarts all ranks of this machine when one is lost.

A rank is lost when its process dies, or when an operation between ranks fails and no rank raised
an error itself. The launcher then kills and restarts all ranks, which resume from the state that
they wrote into memory held by the launcher. A rank that was only stopped is sent SIGCONT.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from moefold.comm.config import Survive
from moefold.comm.interrupt import NO_MESSAGES, Messages
from moefold.comm.launch import (
    TIME_OUT_S,
    RankLost,
    Workers,
    forward_signals,
    raise_rank_error,
)
from moefold.comm.worker import ATTEMPTS, BEATS, STEPS, Attempt, RankLoss, RankMemory


def launch_elastic(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    record: Survive,
    time_out_s: float = TIME_OUT_S,
    device: str = "cpu",
    messages: Messages = NO_MESSAGES,
) -> Any:
    """Call ``function(info, attempt, *args)`` on ranks of this machine; return rank 0's result.

    When ranks are lost, all are restarted and the function is called again; it must resume from
    what it wrote into ``attempt.memory``. Otherwise like :func:`moefold.comm.launch.launch`.

    Raises:
        ValueError, OSError: a rank's own error, if it is one of these.
        RankError: for a rank's other errors; ``RankLost`` after too many losses.
        KeyboardInterrupt: if the ranks ended after an interrupt.
    """
    memories = [RankMemory.create() for _ in range(nproc)]
    limit = RestartLimit(record, memories)
    loss = None
    running: list[Workers] = []

    def forward(number: int) -> None:
        for workers in running:
            workers.forward_signal(number)

    with ExitStack() as closing:
        for memory in memories:
            closing.callback(memory.close)
        closing.enter_context(raise_rank_error())
        received = closing.enter_context(forward_signals(forward, messages))
        for number in count():
            attempts = [Attempt(memory, number, loss) for memory in memories]
            rank_args = [(attempt, *args) for attempt in attempts]
            workers = Workers(function, rank_args, time_out_s, device, attempts)
            running[:] = [workers]
            try:
                workers.start()
                for signum in set(received):
                    workers.signal(signum)
                results = workers.collect_results(find_silent=limit.silence_detector())
                workers.release()
                return results[0]
            except RankLost as lost:
                done = [result for result in lost.results if result and result.ok]
                if done:  # The work is done: a rank that died since had nothing left to do.
                    return done[0].value
                loss = RankLoss(lost.ranks, lost.reason, time.time())
                if len(set(received)) < len(received) or (received and not limit.has_stored_state):
                    raise  # Interrupted twice, or before there was any state to save.
                limit.count_loss(lost.reason)
            finally:
                workers.kill()
    raise AssertionError("attempts go on until one returns or raises")


class RestartLimit:
    """Counts losses of ranks, and raises after too many.

    Args:
        record: the limits.
        memories: each rank's memory, whose counters are read.
    """

    def __init__(self, record: Survive, memories: Sequence[RankMemory]) -> None:
        self._record = record
        self._memories = memories
        self._times: deque[float] = deque()
        self._in_a_row = 0
        self._last_steps = -1

    @property
    def has_stored_state(self) -> bool:
        """Whether any rank has stored its state, in any attempt."""
        return any(memory.counters[ATTEMPTS] for memory in self._memories)

    def silence_detector(self) -> Callable[[], list[int]]:
        """Return a function that returns the ranks of a new attempt without heartbeat.

        It returns a rank again after each further ``stopped_s`` of silence.
        """
        beats = [memory.counters[BEATS] for memory in self._memories]
        heard_at = [time.monotonic()] * len(beats)

        def find_silent() -> list[int]:
            now = time.monotonic()
            for rank, memory in enumerate(self._memories):
                if memory.counters[BEATS] != beats[rank]:
                    beats[rank] = memory.counters[BEATS]
                    heard_at[rank] = now
            since = now - self._record.stopped_s
            silent = [rank for rank, last in enumerate(heard_at) if last < since]
            for rank in silent:
                heard_at[rank] = now
            return silent

        return find_silent

    def count_loss(self, reason: str) -> None:
        """Count a loss.

        Raises:
            RankLost: if losses are too frequent, or recur at one step.
        """
        now = time.monotonic()
        record = self._record
        self._times.append(now)
        while now - self._times[0] > record.window_s:
            self._times.popleft()
        steps = min(memory.counters[STEPS] for memory in self._memories)
        self._in_a_row = self._in_a_row + 1 if steps == self._last_steps else 1
        self._last_steps = steps
        what = ""
        if self._in_a_row >= record.same_step:
            done = f"after step {steps - 1}" if steps else "before the first step"
            what = f"ranks were lost {self._in_a_row} times in a row {done}"
        elif len(self._times) > record.limit:
            what = f"ranks were lost {len(self._times)} times within {record.window_s:g} s"
        if what:
            raise RankLost(
                f"{reason}; {what}, too often for watch.survive. Find the cause (memory, the "
                "device, the data of this step), then repeat the command with --folder to resume "
                "from the newest checkpoint"
            )
