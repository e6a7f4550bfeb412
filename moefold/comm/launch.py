"""Starts ranks on this machine: each its own process, the store they meet at in this one.

Ranks fork from a server that has torch and the ranks' own module loaded already, so eight start in
about half a second.
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
"""How long ranks have to say their own error after the first one's; after a death."""
CAUSE_S = 30.0
"""How long ranks that only repeat the first one's error wait for its own word."""
DEAD = "died"
"""What became of a rank that says nothing any more; in place of its answer's value."""
Answers = Sequence[Answer | None]


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the text holds what is known.

    ``error`` is what the rank raised, where that is for people: of the same type and text.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.error = error
        super().__init__(text)


class RankLost(RankError):
    """No rank failed by itself: some died, or an operation between ranks failed.

    Attributes:
        why: what is known, in one line.
        ranks: those that died.
        answers: what each rank had said by then, None for those that had not.
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
    SIGUSR1 and a first SIGINT reach the ranks, a second SIGINT ends them. A rank computes on one
    thread unless OMP_NUM_THREADS is set.

    Ranks wait ``time_out_s`` for each other in an operation; ``words`` answer Ctrl-C.

    Raises:
        ValueError, OSError: what the first rank that failed raised, where it is one of these.
        RankError: with the first rank that failed, and the report where ranks waited in vain.
        KeyboardInterrupt: where ranks ended after an interrupt, and at the second one.
    """
    with as_one_process():
        return all_answers(function, nproc, args, time_out_s, device, words=words)[0]


@contextmanager
def as_one_process() -> Iterator[None]:
    """Raise a rank's error for people as it would be without other ranks."""
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
    """Do as ``launch``, and return every rank's result; with ``limit_s``, within that time."""
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
    """The ranks of one attempt, seen from the launcher: their processes and the store they meet at.

    ``args`` are of each rank, ``attempts`` what each is told where ranks are started anew. The
    function's module is loaded in the server that ranks fork from, and what builds their parts.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        time_out_s: float,
        device: str = "cpu",
        attempts: Sequence[Attempt] = (),
    ) -> None:
        """Serve the store; no rank is started yet."""
        self._context = fork_server(function.__module__, *owner_modules())
        self._function, self._args, self._attempts = function, args, attempts
        self._time_out_s, self._device = time_out_s, device
        self._store = serve(0, time_out_s)
        self._ranks: list[Rank] = []

    def start(self) -> None:
        """Start every rank."""
        count, asked = len(self._args), os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = max(1, int(asked)) if asked.isdecimal() else 1  # OpenMP ignores other words
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

    def hand_on(self, number: int) -> None:
        """Hand a signal on to the ranks; Ctrl-C while they start for the first time ends that."""
        again = any(attempt.number for attempt in self._attempts)
        if number == signal.SIGINT and len(self._ranks) < len(self._args) and not again:
            raise KeyboardInterrupt  # nothing has begun that could be ended in good order
        self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that were started."""
        for rank in self._ranks:
            rank.signal(number)

    def answers(
        self, limit_s: float | None = None, silent: Callable[[], list[int]] | None = None
    ) -> list[Any]:
        """Wait until all ranks have answered, ``limit_s`` at most; return their results in order.

        ``silent`` returns the ranks that give no sign of life. Each is told to go on, which says
        nothing to one that only wants for a core and wakes one that was stopped.

        Raises:
            RankLost: where no rank failed by itself.
            RankError: where one did, or ranks did not answer in time.
        """
        answers = _collect(self._ranks, limit_s, silent)
        if all(answer and answer.ok for answer in answers):
            return [answer.value for answer in answers if answer]
        raise self._failure(answers, limit_s)

    def leave(self) -> None:
        """Let ranks that have answered end by themselves, and wait a moment for them."""
        for rank in self._ranks:
            rank.leave()

    def end(self) -> None:
        """End every rank, whatever it does: it may be stopped, or wait for one that is gone."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
        # An error that is raised holds this object, and would hold the store's thread and port.
        del self._store

    def _failure(self, answers: Answers, limit_s: float | None) -> RankError:
        """Word the cause: ranks that died, else the rank that failed first by itself."""
        report = report_in(self._store, self._time_out_s)
        failed = [(at, answer) for at, answer in enumerate(answers) if answer and not answer.ok]
        if not failed:
            missing = [at for at, answer in enumerate(answers) if answer is None]
            return RankError(f"no answer from ranks {missing} within {limit_s:g} s{report}")
        dead = tuple(at for at, answer in failed if answer.value == DEAD)
        if dead:
            why = "; ".join(f"rank {at}: the process {self._ranks[at].cause()}" for at in dead)
            return RankLost(why + report, why, dead, answers)
        at, first = min(failed, key=lambda f: (f[1].blames_others, f[1].repeats, f[1].at))
        text = f"rank {at} failed first:\n{first.value}{report}"
        error = first.raised and first.raised.again()
        if not first.blames_others:
            return RankError(text, error)
        said = [line for line in first.value.splitlines() if line not in ("", IN_OPERATION)]
        lost = RankLost(text, f"rank {at}: an operation failed: {said[-1]}", (), answers)
        lost.error = error
        return lost


def _collect(
    ranks: Sequence[Rank], limit_s: float | None, silent: Callable[[], list[int]] | None
) -> list[Answer | None]:
    """Wait until all ranks answered, or one failed and the others had a moment to say why."""
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
    """Hand signals on to the ranks, which are in process groups of their own; list them.

    The first Ctrl-C is answered here, where nothing computes; the second one ends the context, as
    does the end of the ranks after the first.

    Raises:
        KeyboardInterrupt: where Ctrl-C ended it.
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
