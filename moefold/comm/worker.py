"""A rank's process: its main function, and the launcher's handle on it."""

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

from moefold.comm.agree import FirstRankFailed
from moefold.comm.environment import Spot
from moefold.comm.interrupt import deaf_children, listen
from moefold.comm.rendezvous import join
from moefold.comm.world import IN_OPERATION
from moefold.config.plugins import PluginImports

PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"]
POLL_S = 0.1
"""Seconds between heartbeats, and between the launcher's polls of them."""
GRACE_S = 3.0
SOCKET_PATH_BYTES = 107
"""Most bytes of a socket's path on Linux."""
ORPHAN_S = 1.0
BEATS, ATTEMPTS, STEPS = range(3)
"""Indices of the counters: heartbeats, attempts that have stored state, steps stored."""


class Raised(NamedTuple):
    """An error meant for users, in a picklable form."""

    kind: type[Exception]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, error: BaseException) -> "Raised | None":
        """Convert an error; None for one that is not meant for users."""
        if isinstance(error, OSError):
            files = error.filename, None, error.filename2  # None: Windows' error number
            system = (error.errno, error.strerror, *files)
            return cls(OSError, (str(error),) if error.errno is None else system)
        if isinstance(error, ValueError):
            ours = type(error).__module__.startswith("moefold.")
            return cls(type(error) if ours else ValueError, (str(error),))
        return None

    def again(self) -> Exception:
        """Rebuild the error, without its type's ``__init__``, which may have other parameters."""
        return self.kind.__new__(self.kind, *self.args)


class Answer(NamedTuple):
    """A rank's final message to the launcher."""

    ok: bool
    value: Any
    """The function's result, or the traceback; ``DEAD`` if the process died."""
    at: float
    """Time on the monotonic clock, which all processes of a machine share."""
    raised: Raised | None = None
    blames_others: bool = False
    """Whether other ranks may have caused the failure, as in an operation with them."""

    @property
    def repeats(self) -> bool:
        """Whether it only reports that another rank failed."""
        return self.raised is not None and self.raised.kind is FirstRankFailed


class RankMemory:
    """Shared memory that a rank writes and the launcher holds, so that it outlives the rank.

    The first page has counters for the launcher, the rest is the rank's. It is an unnamed file,
    which the system frees with the last process that has it open.
    """

    def __init__(self, file: int) -> None:
        """Map the counters of an open file."""
        self.file = file
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, mmap.PAGESIZE)
        self.counters = memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("q")

    @classmethod
    def create(cls) -> "RankMemory":
        """Create empty memory."""
        if sys.platform == "linux":
            return cls(os.memfd_create("moefold rank"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the open file to a process that is being started."""
        return _opened, (DupFd(self.file),)

    def close(self) -> None:
        """Close this process's reference; the memory is freed with the last one."""
        self.counters.release()
        os.close(self.file)

    @property
    def size(self) -> int:
        """Bytes after the counters."""
        return os.fstat(self.file).st_size - mmap.PAGESIZE

    def map(self, size: int) -> mmap.mmap:
        """Map ``size`` bytes of memory after the counters, growing it if needed.

        Raises:
            OSError: if the system refuses so much memory.
        """
        if size > self.size:
            os.ftruncate(self.file, mmap.PAGESIZE + size)
        return mmap.mmap(self.file, size, offset=mmap.PAGESIZE)


def _opened(file: Any) -> RankMemory:
    return RankMemory(file.detach())


class Loss(NamedTuple):
    """Why an attempt ended."""

    ranks: tuple[int, ...]
    """Ranks that died."""
    why: str
    noticed: float
    """When the launcher noticed, in seconds since the epoch."""


class Attempt(NamedTuple):
    """An attempt of ``launch_elastic``, as one rank receives it."""

    memory: RankMemory
    number: int
    """Number of earlier attempts."""
    loss: Loss | None
    """Why the previous attempt ended; None in the first."""

    def in_step(self, step: int) -> None:
        """Report to the launcher that the state after ``step`` is stored; unblock stop signals.

        Signals during a restart stay pending until then.
        """
        counters = self.memory.counters
        counters[STEPS] = step + 1
        if counters[ATTEMPTS] <= self.number:
            counters[ATTEMPTS] = self.number + 1
            listen()


class RankTask(NamedTuple):
    """What a rank's process runs."""

    spot: Spot
    time_out_s: float
    device: str
    threads: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    attempt: "Attempt | None"
    """For an elastic launch; otherwise None."""


class Rank:
    """The launcher's handle on a rank's process.

    Two pipes connect them: the rank sends its answer through one, and the launcher closes the other
    to release the rank; it also closes when the launcher is gone.
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
        """Send a signal, unless the process has ended."""
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):  # It ended, and the server has not reported it yet.
                os.kill(self.process.pid, number)

    def cause(self) -> str:
        """Return how the process died, as the end of a sentence."""
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"died: killed by {signal.Signals(-code).name}"
        return f"died with exit status {code} and no error message"

    def leave(self) -> None:
        """Release a rank that has answered, and wait briefly for its exit."""
        self._life.close()
        self.process.join(GRACE_S)

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.process.kill()
        self.process.join()
        self._life.close()
        self.answer.close()


def _run_rank(brought: object, task: RankTask, answer: Connection, life: Connection) -> None:
    """Run a rank: join the others, call the function, answer, and wait for the launcher.

    ``brought`` is unpickled first: it imports plug-ins, of whose classes ``task`` may have objects.
    """
    os.setpgrp()
    # The server's imports are never freed; collecting them takes longer than everything else.
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
        blames_others = alone or waited or isinstance(error, FirstRankFailed)
        told = traceback.format_exc(), time.monotonic(), Raised.of(error), blames_others
        with suppress(OSError):  # A launcher that was interrupted may be gone.
            answer.send(Answer(False, *told))
    over.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    # No teardown: it would wait for a group that has failed.
    os._exit(0)


def _live(life: Connection, over: threading.Event, attempt: Attempt | None) -> None:
    """Send heartbeats until the launcher closes its end or is gone; then end the process."""
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
    """Return the context in which ranks fork; its server has imported torch and ``preload``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    resource_tracker.ensure_running()  # if the server started it, that would unblock its signals
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678"):
        # ``multiprocessing`` would create its sockets there; in ``/tmp`` paths are short enough.
        set_before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            get_temp_dir()  # created once, then cached by ``multiprocessing``
        finally:
            tempfile.tempdir = set_before
    with deaf_children():
        forkserver.ensure_running()
    return context
