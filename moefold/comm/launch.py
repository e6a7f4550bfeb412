"""Launches ranks as processes on this machine; this process serves their rendezvous store.

Ranks fork from a server that has already imported torch and the function's module, so that eight
ranks start in about half a second.
"""

import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from moefold.comm.environment import RankInfo
from moefold.comm.fork_server import fork_server, kill_server
from moefold.comm.interrupt import FORWARDED_SIGNALS, NO_MESSAGES, Messages, write_stderr
from moefold.comm.rendezvous import JOIN_TIME_OUT_S, LOOPBACK, connect
from moefold.comm.store import StoreServer
from moefold.comm.watch import recent_report
from moefold.comm.worker import (
    POLL_S,
    SERVER_GONE,
    Attempt,
    RankProcess,
    RankTask,
    WorkerResult,
)
from moefold.comm.world import IN_OPERATION
from moefold.failures import Failure

TIME_OUT_S = 300.0
ERROR_WAIT_S = 0.5
DEATH_WAIT_S = 0.1
"""Seconds that other ranks have to report errors after the first error, or after a death."""
CAUSE_WAIT_S = 30.0
"""Seconds to wait for the original error while ranks only report that another rank failed."""
DEAD = "died"
"""Value of the result recorded for a rank whose process died."""
Results = Sequence[WorkerResult | None]


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the text has all that is known.

    ``error`` is the rank's own error, with its type and text, if it is one meant for users.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.error = error
        super().__init__(text)


class RankLost(RankError, Failure):
    """Ranks died or an operation between ranks failed, and no rank raised an error itself.

    Attributes:
        reason: the cause as far as known, in one line.
        report: the report of a hang, which begins with a new line; empty if there is none.
        ranks: the ranks that died.
        results: each rank's result so far, or None.
    """

    status = 76

    def __init__(
        self, reason: str, report: str = "", ranks: tuple[int, ...] = (), results: Results = ()
    ) -> None:
        self.reason = reason
        self.report = report
        self.ranks = ranks
        self.results = results
        super().__init__(reason + report)


def launch(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    time_out_s: float = TIME_OUT_S,
    device: str = "cpu",
    messages: Messages = NO_MESSAGES,
) -> Any:
    """Call ``function(info, *args)`` on ``nproc`` ranks of this machine; return rank 0's result.

    The function, its arguments and its result must be picklable, and the result small. SIGTERM,
    SIGUSR1 and a first SIGINT are forwarded to the ranks; a second SIGINT kills them. A rank
    computes on one thread unless OMP_NUM_THREADS is set.

    ``time_out_s`` is the time-out of operations between ranks; ``messages`` are shown on Ctrl-C.

    Raises:
        ValueError, OSError: the error of the first rank that failed, if it is one of these.
        RankError: for other errors, with the first rank that failed, and the report if ranks hung.
        KeyboardInterrupt: if ranks ended after an interrupt, or on the second one.
    """
    with raise_rank_error():
        return launch_all(function, nproc, args, time_out_s, device, messages=messages)[0]


@contextmanager
def raise_rank_error() -> Iterator[None]:
    """Raise a rank's own error in place of the :class:`RankError` that carries it."""
    try:
        yield
    except RankError as failed:
        if failed.error is None:
            raise
        raise failed.error from failed


def launch_all(
    function: Callable[..., Any],
    nproc: int,
    args: Sequence[Any],
    time_out_s: float,
    device: str = "cpu",
    limit_s: float | None = None,
    messages: Messages = NO_MESSAGES,
) -> list[Any]:
    """Launch like :func:`launch`, for ``limit_s`` at most, and return all ranks' results."""
    workers = Workers(function, [tuple(args)] * nproc, time_out_s, device)
    try:
        with forward_signals(workers.forward_signal, messages):
            workers.start()
            results = workers.collect_results(limit_s)
        workers.release()
        return results
    finally:
        workers.kill()


class Workers:
    """The rank processes of one attempt and their rendezvous store, as the launcher sees them.

    ``args`` has each rank's arguments, and ``attempts`` each rank's attempt in an elastic launch.
    The server that ranks fork from, if there is none yet, imports the function's module.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        time_out_s: float,
        device: str = "cpu",
        attempts: Sequence[Attempt] = (),
    ) -> None:
        """Serve the store; :meth:`start` starts the ranks."""
        self._context = fork_server(function.__module__)
        self._function = function
        self._args = args
        self._attempts = attempts
        self._time_out_s = time_out_s
        self._device = device
        self._secret = secrets.token_hex(32).encode()
        self._store = StoreServer(self._secret, LOOPBACK)
        self._ranks: list[RankProcess] = []
        self._interrupted = False

    def start(self) -> None:
        """Start every rank."""
        count = len(self._args)
        text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = max(1, int(text)) if text.isdecimal() else 1  # OpenMP ignores other values
        with _server_must_answer():
            for rank, args in enumerate(self._args):
                info = RankInfo(rank, count, rank, LOOPBACK, self._store.port, store_running=True)
                task = RankTask(
                    info._replace(secret=self._secret),
                    self._time_out_s,
                    self._device,
                    threads,
                    self._function,
                    args,
                    self._attempts[rank] if self._attempts else None,
                )
                self._ranks.append(RankProcess(self._context, task))
                if self._interrupted:
                    raise KeyboardInterrupt

    def forward_signal(self, number: int) -> None:
        """Forward a signal to the ranks; Ctrl-C during their first start aborts the start."""
        is_restart = any(attempt.number for attempt in self._attempts)
        if number == signal.SIGINT and len(self._ranks) < len(self._args) and not is_restart:
            # No work has begun that would need an orderly end. But this rank's start is completed:
            # the server fails, with a traceback, if a request to fork breaks off.
            self._interrupted = True
            return
        self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks started so far."""
        for rank in self._ranks:
            rank.signal(number)

    def collect_results(
        self, limit_s: float | None = None, find_silent: Callable[[], list[int]] | None = None
    ) -> list[Any]:
        """Wait for all ranks, ``limit_s`` at most; return their functions' results in rank order.

        ``find_silent`` returns the ranks without heartbeat. They are sent SIGCONT, which wakes a
        stopped process and has no effect on one that only waits for a core.

        Raises:
            RankLost: if ranks failed, but none raised an error itself; a rank's traceback is its
                cause.
            RankError: if one did, or ranks did not finish in time.
        """
        results = _collect_results(self._ranks, limit_s, find_silent)
        if all(result and result.ok for result in results):
            return [result.value for result in results if result]
        store = connect(LOOPBACK, self._store.port, self._time_out_s, self._secret)
        report = recent_report(store, self._time_out_s)
        failed = [(rank, result) for rank, result in enumerate(results) if result and not result.ok]
        if not failed:
            missing = [rank for rank, result in enumerate(results) if result is None]
            raise RankError(f"no answer from ranks {missing} within {limit_s:g} s{report}")
        dead = tuple(rank for rank, result in failed if result.value == DEAD)
        if dead:
            raise RankLost(self._describe_deaths(dead), report, dead, results)
        rank, first = min(failed, key=lambda f: (f[1].blames_others, f[1].is_secondary, f[1].time))
        text = f"rank {rank} failed first:\n{first.value}{report}"
        error = first.error and first.error.rebuild()
        if not first.blames_others:
            raise RankError(text, error)
        lines = [line for line in first.value.splitlines() if line not in ("", IN_OPERATION)]
        reason = f"rank {rank}: communication failed: {lines[-1]}"
        lost = RankLost(reason, report, (), results)
        lost.error = error
        raise lost from RankError(text)

    def _describe_deaths(self, ranks: Sequence[int]) -> str:
        """Return how ranks died, in one line; those that died in one way are named together."""
        by_way: dict[str, list[int]] = {}
        for rank in ranks:
            by_way.setdefault(self._ranks[rank].describe_exit(), []).append(rank)
        sentences = list[str]()
        for way, named in by_way.items():
            if len(named) == 1:
                sentences.append(f"rank {named[0]} {way}")
            else:
                several = ", ".join(map(str, named))
                sentences.append(f"ranks {several} {way.replace('was ', 'were ', 1)}")
        return "; ".join(sentences)

    def release(self) -> None:
        """Release ranks that have sent their results, and wait briefly for their exit."""
        for rank in self._ranks:
            rank.release()

    def kill(self) -> None:
        """Kill every rank: it may be stopped, or wait for one that has exited."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.kill()
        self._store.close()


@contextmanager
def _server_must_answer() -> Iterator[None]:
    """Limit the time in which the server that ranks fork from starts them; after it, kill it.

    Raises:
        RankLost: if the server ends.
    """
    limit = threading.Timer(JOIN_TIME_OUT_S, kill_server)
    limit.daemon = True
    limit.start()
    try:
        yield
    except (EOFError, ConnectionError, ChildProcessError) as error:
        raise RankLost(SERVER_GONE) from error
    finally:
        limit.cancel()


def _collect_results(
    ranks: Sequence[RankProcess], limit_s: float | None, find_silent: Callable[[], list[int]] | None
) -> list[WorkerResult | None]:
    """Wait for all results, or until one rank failed and the others had time to report a cause."""
    results: list[WorkerResult | None] = [None] * len(ranks)
    until = math.inf if limit_s is None else time.monotonic() + limit_s
    shortest = math.inf
    while any(result is None for result in results):
        ends = {rank.result: i for i, rank in enumerate(ranks) if results[i] is None}
        remaining = max(0.0, until - time.monotonic())
        limit = min(remaining, POLL_S if find_silent else math.inf)
        ready = wait(list(ends), timeout=None if limit == math.inf else limit)
        if not ready and time.monotonic() >= until:
            return results
        for end in ready:
            rank = ends[end]
            try:
                results[rank] = ranks[rank].result.recv()
            except (EOFError, OSError):
                results[rank] = WorkerResult(False, DEAD, time.monotonic())
        for rank in find_silent() if find_silent else ():
            ranks[rank].signal(signal.SIGCONT)
        failed = [result for result in results if result and not result.ok]
        waits = (
            DEATH_WAIT_S if a.value == DEAD else CAUSE_WAIT_S if a.is_secondary else ERROR_WAIT_S
            for a in failed
        )
        if (patience := min(waits, default=math.inf)) < shortest:
            shortest = patience
            until = min(until, time.monotonic() + patience)
    return results


@contextmanager
def forward_signals(
    send: Callable[[int], None], messages: Messages = NO_MESSAGES
) -> Iterator[list[int]]:
    """Forward signals to the ranks, which have separate process groups; yield those received.

    The first Ctrl-C is acknowledged at once. The second, or a failure of ranks after the first,
    ends the context.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the context.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGINT and received.count(number) > 1:
            raise KeyboardInterrupt(messages.second)
        send(number)
        if number == signal.SIGINT and messages.first:
            write_stderr(messages.first)

    previous = {number: signal.signal(number, handle) for number in FORWARDED_SIGNALS}
    try:
        yield received
    except RankError:
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
