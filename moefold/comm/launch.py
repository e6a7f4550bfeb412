"""Launches ranks as processes on this machine; this process serves their rendezvous store.

Ranks fork from a server that has already imported torch and the function's module, so that eight
start in about half a second.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from moefold.comm.environment import Spot
from moefold.comm.interrupt import FORWARDED, SILENT, Words, say
from moefold.comm.rendezvous import serve
from moefold.comm.watch import report_in
from moefold.comm.worker import POLL_S, Answer, Attempt, Rank, RankTask, fork_server
from moefold.comm.world import IN_OPERATION
from moefold.config.slot import owner_modules

TIME_OUT_S = 300.0
SETTLE_S, DEATH_SETTLE_S = 0.5, 0.1
"""Seconds that other ranks have to report their errors after the first error; after a death."""
CAUSE_S = 30.0
"""Seconds to wait for the original error where ranks have only reported that another failed."""
DEAD = "died"
"""Value of the answer recorded for a rank whose process died."""
Answers = Sequence[Answer | None]


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the text has all that is known.

    ``error`` is the rank's own error, of the same type and text, if it is one meant for users.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.error = error
        super().__init__(text)


class RankLost(RankError):
    """Ranks died, or an operation between ranks failed, and no rank raised an error of its own.

    Attributes:
        why: the cause as far as known, in one line.
        ranks: the ranks that died.
        answers: each rank's answer by then, or None.
    """

    def __init__(self, text: str, why: str, ranks: tuple[int, ...], answers: Answers) -> None:
        self.why, self.ranks, self.answers = why, ranks, answers
        super().__init__(text)


def launch(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    time_out_s: float = TIME_OUT_S,
    device: str = "cpu",
    words: Words = SILENT,
) -> Any:
    """Call ``function(spot, *args)`` on ``nproc`` ranks of this machine; return rank 0's result.

    The function, its arguments and its result must be picklable, and the result small. SIGTERM,
    SIGUSR1 and a first SIGINT are forwarded to the ranks; a second SIGINT kills them. A rank
    computes on one thread unless OMP_NUM_THREADS is set.

    ``time_out_s`` is the time-out of operations between ranks; ``words`` are shown on Ctrl-C.

    Raises:
        ValueError, OSError: the error of the first rank that failed, if it is one of these.
        RankError: otherwise, with the first rank that failed, and the report if ranks hung.
        KeyboardInterrupt: if ranks ended after an interrupt, or on the second one.
    """
    with as_one_process():
        return all_answers(function, nproc, args, time_out_s, device, words=words)[0]


@contextmanager
def as_one_process() -> Iterator[None]:
    """Raise a rank's own error in place of the :class:`RankError` that carries it."""
    try:
        yield
    except RankError as failed:
        if failed.error is None:
            raise
        raise failed.error from failed


def all_answers(
    function: Callable[..., Any],
    nproc: int,
    args: Sequence[Any],
    time_out_s: float,
    device: str = "cpu",
    limit_s: float | None = None,
    words: Words = SILENT,
) -> list[Any]:
    """Launch like :func:`launch`, within ``limit_s`` if given, and return all ranks' results."""
    workers = Workers(function, [tuple(args)] * nproc, time_out_s, device)
    try:
        with forwarding(workers.hand_on, words):
            workers.start()
            answers = workers.answers(limit_s)
        workers.leave()
        return answers
    finally:
        workers.end()


class Workers:
    """The launcher's view of one attempt: the ranks' processes and their rendezvous store.

    ``args`` has each rank's arguments, ``attempts`` each one's attempt where ranks are restarted.
    The server that ranks fork from imports the function's module and those that build parts.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        time_out_s: float,
        device: str = "cpu",
        attempts: Sequence[Attempt] = (),
    ) -> None:
        """Serve the store, without starting ranks."""
        self._context = fork_server(function.__module__, *owner_modules())
        self._function, self._args, self._attempts = function, args, attempts
        self._time_out_s, self._device = time_out_s, device
        self._store = serve(0, time_out_s)
        self._ranks: list[Rank] = []
        self._interrupted = False

    def start(self) -> None:
        """Start every rank."""
        count, asked = len(self._args), os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = max(1, int(asked)) if asked.isdecimal() else 1  # OpenMP ignores other values
        for rank, args in enumerate(self._args):
            task = RankTask(
                Spot(rank, count, rank, "127.0.0.1", self._store.port, served=True),
                self._time_out_s,
                self._device,
                threads,
                self._function,
                args,
                self._attempts[rank] if self._attempts else None,
            )
            self._ranks.append(Rank(self._context, task))
            if self._interrupted:
                raise KeyboardInterrupt

    def hand_on(self, number: int) -> None:
        """Forward a signal to the ranks; Ctrl-C while they first start aborts the start."""
        again = any(attempt.number for attempt in self._attempts)
        if number == signal.SIGINT and len(self._ranks) < len(self._args) and not again:
            # No work has begun that would need an orderly end. But a rank is started whole: the
            # server fails, with a traceback, if a request to fork breaks off.
            self._interrupted = True
            return
        self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks started so far."""
        for rank in self._ranks:
            rank.signal(number)

    def answers(
        self, limit_s: float | None = None, silent: Callable[[], list[int]] | None = None
    ) -> list[Any]:
        """Wait until all ranks have answered, ``limit_s`` at most; return their results in order.

        ``silent`` returns the ranks without heartbeat. They are sent SIGCONT, which wakes a stopped
        process and has no effect on one that only waits for a core.

        Raises:
            RankLost: if no rank raised an error of its own.
            RankError: if one did, or ranks did not answer in time.
        """
        answers = _collect(self._ranks, limit_s, silent)
        if all(answer and answer.ok for answer in answers):
            return [answer.value for answer in answers if answer]
        report = report_in(self._store, self._time_out_s)
        failed = [(at, answer) for at, answer in enumerate(answers) if answer and not answer.ok]
        if not failed:
            missing = [at for at, answer in enumerate(answers) if answer is None]
            raise RankError(f"no answer from ranks {missing} within {limit_s:g} s{report}")
        dead = tuple(at for at, answer in failed if answer.value == DEAD)
        if dead:
            why = "; ".join(f"rank {at}: the process {self._ranks[at].cause()}" for at in dead)
            raise RankLost(why + report, why, dead, answers)
        at, first = min(failed, key=lambda f: (f[1].blames_others, f[1].repeats, f[1].at))
        text = f"rank {at} failed first:\n{first.value}{report}"
        error = first.raised and first.raised.again()
        if not first.blames_others:
            raise RankError(text, error)
        said = [line for line in first.value.splitlines() if line not in ("", IN_OPERATION)]
        lost = RankLost(text, f"rank {at}: communication failed: {said[-1]}", (), answers)
        lost.error = error
        raise lost

    def leave(self) -> None:
        """Let ranks that have answered exit by themselves, and wait briefly for them."""
        for rank in self._ranks:
            rank.leave()

    def end(self) -> None:
        """Kill every rank: it may be stopped, or wait for one that is gone."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
        # A raised error references this object, and would keep the store's thread and port.
        del self._store


def _collect(
    ranks: Sequence[Rank], limit_s: float | None, silent: Callable[[], list[int]] | None
) -> list[Answer | None]:
    """Wait until all ranks answered, or one failed and the others had time to report a cause."""
    answers: list[Answer | None] = [None] * len(ranks)
    until = math.inf if limit_s is None else time.monotonic() + limit_s
    shortest = math.inf
    while any(answer is None for answer in answers):
        ends = {rank.answer: i for i, rank in enumerate(ranks) if answers[i] is None}
        left = max(0.0, until - time.monotonic())
        limit = min(left, POLL_S if silent else math.inf)
        ready = wait(list(ends), timeout=None if limit == math.inf else limit)
        if not ready and time.monotonic() >= until:
            return answers
        for end in ready:
            at = ends[end]  # type: ignore[index]
            try:
                answers[at] = ranks[at].answer.recv()
            except (EOFError, OSError):
                answers[at] = Answer(False, DEAD, time.monotonic())
        for at in silent() if silent else ():
            ranks[at].signal(signal.SIGCONT)
        failed = [answer for answer in answers if answer and not answer.ok]
        said = (
            DEATH_SETTLE_S if a.value == DEAD else CAUSE_S if a.repeats else SETTLE_S
            for a in failed
        )
        if (patience := min(said, default=math.inf)) < shortest:
            shortest, until = patience, min(until, time.monotonic() + patience)
    return answers


@contextmanager
def forwarding(send: Callable[[int], None], words: Words = SILENT) -> Iterator[list[int]]:
    """Forward signals to the ranks, which have separate process groups; yield those received.

    This process answers the first Ctrl-C at once. The second one, or a failure of ranks after the
    first, ends the context.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the context.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def hand_on(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGINT and received.count(number) > 1:
            raise KeyboardInterrupt(words.second)
        send(number)
        if number == signal.SIGINT and words.first:
            say(words.first)

    before = {number: signal.signal(number, hand_on) for number in FORWARDED}
    try:
        yield received
    except RankError:
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
