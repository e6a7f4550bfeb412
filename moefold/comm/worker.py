"""A rank's process, from both ends: what it does, and what the launcher holds of it."""

import gc
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch

from moefold.comm.agree import FirstFailed
from moefold.comm.environment import Spot
from moefold.comm.interrupt import deaf_children, listen
from moefold.comm.rendezvous import join
from moefold.comm.world import IN_OPERATION
from moefold.config.plugins import PluginImports

PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"]
POLL_S = 0.1
"""Seconds between two signs of life, and between the launcher's looks at them."""
GRACE_S = 3.0
SOCKET_PATH_BYTES = 107
ORPHAN_S = 1.0
BEATS, ATTEMPTS, STEPS = range(3)
"""Places of the counters: beats of the process, attempts that were in step, steps kept; from 0."""


class Raised(NamedTuple):
    """An error for people, in a form that travels between processes."""

    kind: type[Exception]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, error: BaseException) -> "Raised | None":
        """Take down an error; None for one that is not for people."""
        if isinstance(error, OSError):
            files = error.filename, None, error.filename2  # between them Windows' own number
            system = (error.errno, error.strerror, *files)
            return cls(OSError, (str(error),) if error.errno is None else system)
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
    """What the function returned, or the traceback; ``DEAD`` instead of one."""
    at: float
    """When, on the clock that all processes of a machine share."""
    raised: Raised | None = None
    blames_others: bool = False
    """Whether others may have caused a failure: it was in an operation with them."""

    @property
    def repeats(self) -> bool:
        """Whether it only says that another rank has failed."""
        return self.raised is not None and self.raised.kind is FirstFailed


class RankMemory:
    """Memory that one rank writes and the launcher holds, so that it outlives the rank's process.

    The first page holds counters that the launcher reads; what lies behind it is the rank's. It is
    a file without a name, which the system frees with the last process that has it open.
    """

    def __init__(self, file: int) -> None:
        """Map the counters of an open file."""
        self.file = file
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, mmap.PAGESIZE)
        self.counters = memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("q")

    @classmethod
    def create(cls) -> "RankMemory":
        """Return memory in which nothing is written yet."""
        if sys.platform == "linux":
            return cls(os.memfd_create("moefold rank"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Hand the open file on to a process that is being started."""
        return _opened, (DupFd(self.file),)

    def close(self) -> None:
        """Give the memory back, once no other process has it open."""
        self.counters.release()
        os.close(self.file)

    @property
    def size(self) -> int:
        """Bytes behind the counters."""
        return os.fstat(self.file).st_size - mmap.PAGESIZE

    def map(self, size: int) -> mmap.mmap:
        """Return ``size`` bytes of memory behind the counters; what is written there stays.

        Raises:
            OSError: where the system refuses so much memory.
        """
        if size > self.size:
            os.ftruncate(self.file, mmap.PAGESIZE + size)
        return mmap.mmap(self.file, size, offset=mmap.PAGESIZE)


def _opened(file: Any) -> RankMemory:
    return RankMemory(file.detach())


class Loss(NamedTuple):
    """Why an attempt ended."""

    ranks: tuple[int, ...]
    """Those that died."""
    why: str
    noticed: float
    """When the launcher saw it, in seconds since the epoch."""


class Attempt(NamedTuple):
    """What a rank of ``launch_elastic`` is told about the attempt that it is part of."""

    memory: RankMemory
    number: int
    """How often the ranks were started before."""
    loss: Loss | None
    """Why they are started again; None at the first time."""

    def in_step(self, step: int) -> None:
        """Tell the launcher that the state after ``step`` is kept; hear signals from now on.

        Those that came while lost ranks were started anew have waited until now.
        """
        counters = self.memory.counters
        counters[STEPS] = step + 1
        if counters[ATTEMPTS] <= self.number:
            counters[ATTEMPTS] = self.number + 1
            listen()


class RankTask(NamedTuple):
    """What a rank's process is to do."""

    spot: Spot
    time_out_s: float
    device: str
    threads: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    attempt: "Attempt | None"
    """Of ranks that are started anew when some are lost; else None."""


class Rank:
    """One rank, seen from the launcher.

    Its process has its ends of two pipes: it answers by one and hears by the other that the
    launcher lets it go, or is gone.
    """

    def __init__(self, context: Any, task: RankTask) -> None:
        self.answer, theirs = context.Pipe(duplex=False)
        its_life, self._life = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_run_rank, args=(PluginImports(), task, theirs, its_life)
        )
        self.process.start()
        theirs.close()
        its_life.close()

    def signal(self, number: int) -> None:
        """Send a signal, unless the rank is over."""
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):  # It ended since, and the server has not said so.
                os.kill(self.process.pid, number)

    def cause(self) -> str:
        """Say what a process died of, as the end of a sentence."""
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"died: killed by {signal.Signals(-code).name}"
        return f"died without a word, exit status {code}"

    def leave(self) -> None:
        """Let a rank that has answered go, and wait a moment for it."""
        self._life.close()
        self.process.join(GRACE_S)

    def end(self) -> None:
        """End a rank, and wait until it is gone."""
        self.process.kill()
        self.process.join()
        self._life.close()
        self.answer.close()


def _run_rank(brought: object, task: RankTask, answer: Connection, life: Connection) -> None:
    """Be a rank: join the others, call the function, answer, and stay until the launcher ends.

    ``brought`` is loaded first, so that what is made of parts from outside can be.
    """
    os.setpgrp()
    # What the server has loaded stays for good; looking through it takes longer than all else.
    gc.freeze()
    torch.set_num_threads(task.threads)
    over, joined = threading.Event(), False
    threading.Thread(target=_live, args=(life, over, task.attempt), daemon=True).start()
    try:
        if task.attempt is None or not task.attempt.number:
            listen()
        join(task.spot, task.time_out_s, task.device)
        joined = True
        value = task.function(task.spot, *task.args)
        answer.send(Answer(True, value, time.monotonic()))
    except BaseException as error:
        waited = IN_OPERATION in getattr(error, "__notes__", ())
        alone = not joined and isinstance(error, RuntimeError)
        blames_others = alone or waited or isinstance(error, FirstFailed)
        told = traceback.format_exc(), time.monotonic(), Raised.of(error), blames_others
        with suppress(OSError):  # A launcher that was interrupted may be gone.
            answer.send(Answer(False, *told))
    over.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is torn down: a group that failed would be waited for.
    os._exit(0)


def _live(life: Connection, over: threading.Event, attempt: Attempt | None) -> None:
    """Wait for the launcher to close its end, or to be gone; nobody outlives it."""
    try:
        while not life.poll(None if attempt is None else POLL_S):
            if attempt is not None:
                attempt.memory.counters[BEATS] += 1
        life.recv()
    except (EOFError, OSError):
        over.set()
        time.sleep(ORPHAN_S)
        os._exit(1)


def fork_server(*preload: str) -> Any:
    """Return the context that ranks fork in; its server has torch and ``preload`` loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    resource_tracker.ensure_running()  # starting it would give the server its ears back
    keep_socket_paths_short()
    with deaf_children():
        forkserver.ensure_running()
    return context


def keep_socket_paths_short() -> None:
    """Have ``multiprocessing`` place its sockets where their paths are short enough.

    They lie in the system's temporary folder, and a path of a socket holds 107 bytes on Linux;
    below a longer ``TMPDIR`` they lie in ``/tmp``.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678"):
        return
    set_before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        get_temp_dir()  # made once, and kept by ``multiprocessing``
    finally:
        tempfile.tempdir = set_before
