"""Starts ranks on this machine: each its own process, the store they meet at in this one.

Ranks fork from a server that has torch loaded already, so eight start in about half a second.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch

from moefold.comm.agree import FirstFailed
from moefold.comm.environment import Spot
from moefold.comm.interrupt import SILENT, Words, deaf_children, listen, say
from moefold.comm.join import join
from moefold.comm.store import serve
from moefold.comm.watch import report_in
from moefold.config.uses import Brought

TIME_OUT_S = 300.0
PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"]
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SETTLE_S = 0.5
CAUSE_S = 30.0
"""How long ranks that only repeat the first one's error wait for its own word."""
GRACE_S = 3.0
SOCKET_PATH_BYTES = 107
ORPHAN_S = 1.0


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the text holds what is known.

    ``error`` is what the rank raised, where that is for people: of the same type and text.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.error = error
        super().__init__(text)


class Raised(NamedTuple):
    """An error for people, in a form that travels between processes."""

    kind: type[Exception]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, error: BaseException) -> "Raised | None":
        """Take down an error; None for one that is not for people."""
        if isinstance(error, OSError):
            return cls(OSError, (error.errno, error.strerror, error.filename))
        if isinstance(error, ValueError):
            ours = type(error).__module__.startswith("moefold.")
            return cls(type(error) if ours else ValueError, (str(error),))
        return None

    def again(self) -> Exception:
        """Return the error; its type's own ``__init__`` may want more than the text."""
        return self.kind.__new__(self.kind, *self.args)


class Answer(NamedTuple):
    """What a rank had to say at its end."""

    ok: bool
    value: Any
    """What the function returned, or the traceback."""
    at: float
    """When, on the clock that all processes of a machine share."""
    raised: Raised | None = None

    @property
    def repeats(self) -> bool:
        """Whether it only says that another rank has failed."""
        return self.raised is not None and self.raised.kind is FirstFailed

    @property
    def error(self) -> Exception | None:
        """What the rank raised, where that is for people."""
        return None if self.raised is None else self.raised.again()


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

    Args:
        function: what each rank runs, its process group being there.
        nproc: number of ranks.
        args: what the function is given after its ``Spot``.
        time_out_s: how long ranks wait for each other in an operation.
        device: ``cpu`` or ``cuda``.
        words: what Ctrl-C is answered with.

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
    context = fork_server()
    store = serve(0, time_out_s)
    threads = threads_each()
    ranks: list[Rank] = []

    def hand_on(number: int) -> None:
        if number == signal.SIGINT and len(ranks) < nproc:
            raise KeyboardInterrupt  # nothing has begun that could be ended in good order
        for rank in ranks:
            rank.signal(number)

    try:
        with forwarding(hand_on, words) as received:
            for rank in range(nproc):
                spot = Spot(rank, nproc, rank, "127.0.0.1", store.port, served=True)
                task = (spot, time_out_s, device, threads, function, tuple(args))
                ranks.append(Rank(context, _run_rank, task))
            answers = _collect(ranks, limit_s)
        if not all(answer and answer.ok for answer in answers):
            if signal.SIGINT in received:
                raise KeyboardInterrupt
            what, error = _what_failed(answers, ranks, limit_s)
            raise RankError(what + report_in(store, time_out_s), error)
        for rank in ranks:
            rank.leave()
        return [answer.value for answer in answers if answer]
    finally:
        for rank in ranks:
            rank.end()


def fork_server(*preload: str) -> Any:
    """Return the context that ranks fork in; its server has torch and ``preload`` loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    resource_tracker.ensure_running()  # starting it would give the server its ears back
    with short_socket_path(), deaf_children():
        forkserver.ensure_running()
    return context


@contextmanager
def short_socket_path() -> Iterator[None]:
    """Place ``multiprocessing``'s sockets where their paths are short enough.

    They lie in the system's temporary folder, and a path of a socket holds 107 bytes on Linux;
    below a longer ``TMPDIR`` they lie in ``/tmp``.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678"):
        yield
        return
    set_before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        get_temp_dir()  # made once, and kept by ``multiprocessing``
    finally:
        tempfile.tempdir = set_before
    yield


def threads_each() -> int:
    """Return how many threads a rank computes on."""
    return int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0])


class Rank:
    """One rank, seen from the launcher.

    Its process calls ``target(task, answer, life)`` with its ends of two pipes: one to say
    something by, one to hear something by.
    """

    def __init__(self, context: Any, target: Callable[..., None], task: tuple[Any, ...]) -> None:
        self.answer, theirs = context.Pipe(duplex=False)
        its_life, self.life = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_begin, args=(Brought(), target, task, theirs, its_life)
        )
        self.process.start()
        theirs.close()
        its_life.close()

    def signal(self, number: int) -> None:
        """Send a signal, unless the rank is over."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def cause(self) -> str:
        """Say what a process died of, as the end of a sentence."""
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f": killed by {signal.Signals(-code).name}"
        return f" without a word, exit status {code}"

    def leave(self) -> None:
        """Let a rank that has answered go, and wait a moment for it."""
        self.life.close()
        self.process.join(GRACE_S)

    def end(self) -> None:
        """End a rank whatever it does: it may be stopped, or wait for one that is gone."""
        self.process.kill()
        self.process.join()
        self.life.close()
        self.answer.close()


def _begin(brought: object, target: Callable[..., None], *args: Any) -> None:
    """Be a process that can load what is made of parts from outside."""
    target(*args)


def _collect(ranks: list[Rank], limit_s: float | None) -> list[Answer | None]:
    """Wait until all ranks answered, or one failed and the others had a moment to say why."""
    answers: list[Answer | None] = [None] * len(ranks)
    until = None if limit_s is None else time.monotonic() + limit_s
    failing = False
    while any(answer is None for answer in answers):
        ends = {rank.answer: i for i, rank in enumerate(ranks) if answers[i] is None}
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = wait(list(ends), timeout=left)
        if not ready:
            return answers
        for end in ready:
            at = ends[end]  # type: ignore[index]
            try:
                answers[at] = ranks[at].answer.recv()
            except EOFError:
                answers[at] = Answer(False, "", time.monotonic())
        failed = [answer for answer in answers if answer and not answer.ok]
        if failed and not failing:
            failing = not all(answer.repeats for answer in failed)
            until = time.monotonic() + (SETTLE_S if failing else CAUSE_S)
    return answers


def _what_failed(
    answers: list[Answer | None], ranks: list[Rank], limit_s: float | None
) -> tuple[str, Exception | None]:
    """Word the cause: a rank that died without a word, else the rank that failed first.

    With it comes what that rank raised, where that is for people.
    """
    failures = [(rank, answer) for rank, answer in enumerate(answers) if answer and not answer.ok]
    if not failures:
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        return f"no answer from ranks {silent} within {limit_s:g} s", None
    rank, answer = min(failures, key=lambda f: (bool(f[1].value), f[1].repeats, f[1].at))
    if answer.value:
        return f"rank {rank} failed first:\n{answer.value}", answer.error
    return f"rank {rank}: the process died{ranks[rank].cause()}", None


@contextmanager
def forwarding(send: Callable[[int], None], words: Words = SILENT) -> Iterator[list[int]]:
    """Hand signals on to the ranks, which are in process groups of their own; list them.

    The first Ctrl-C is answered here, where nothing computes; the second one ends the context.
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
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_rank(task: tuple[Any, ...], answer: Connection, life: Connection) -> None:
    """Be a rank: join the others, call the function, answer, and stay until the launcher ends."""
    spot, time_out_s, device, threads, function, args = task
    os.setpgrp()
    torch.set_num_threads(threads)
    over = threading.Event()
    threading.Thread(target=_live, args=(life, over), daemon=True).start()
    try:
        listen()
        join(spot, time_out_s, device)
        value = function(spot, *args)
        answer.send(Answer(True, value, time.monotonic()))
    except BaseException as error:
        failed = Answer(False, traceback.format_exc(), time.monotonic(), Raised.of(error))
        with suppress(OSError):  # A launcher that was interrupted may be gone.
            answer.send(failed)
    over.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is torn down: a group that failed would be waited for.
    os._exit(0)


def _live(life: Connection, over: threading.Event) -> None:
    """Wait for the launcher to close its end, or to be gone; nobody outlives it."""
    try:
        life.recv()
    except (EOFError, OSError):
        over.set()
        time.sleep(ORPHAN_S)
        os._exit(1)
