"""A rank's process: its main function, and the launcher's handle to it."""

import gc
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from moefold.comm.agree import FirstRankFailed
from moefold.comm.environment import RankInfo
from moefold.comm.fork_server import kill_server, server_pid
from moefold.comm.interrupt import unblock_signals
from moefold.comm.parent import signal_when_parent_ends
from moefold.comm.rendezvous import join
from moefold.comm.world import IN_OPERATION
from moefold.config.plugins import PluginImports
from moefold.failures import Failure, OutOfMemory, describe_shortage, is_out_of_memory

POLL_S = 0.1
"""Seconds between heartbeats, and between the launcher's checks for them."""
GRACE_S = 3.0
"""Seconds that a rank has to end, and the server that it forked from to report it."""
ORPHAN_S = 1.0
SERVER_GONE = "the process that ranks fork from was killed"
SERVER_LOST = 255
"""Exit status that ``multiprocessing`` gives a process whose server has ended."""
BEATS, ATTEMPTS, STEPS = range(3)
"""Indices of counters: heartbeats, attempts that have stored state, steps stored."""


class PicklableError(NamedTuple):
    """An error meant for users, in a picklable form."""

    kind: type[Exception]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, error: BaseException) -> "PicklableError | None":
        """Convert an error; None if it is not meant for users."""
        if isinstance(error, OSError):
            files = error.filename, None, error.filename2  # None: Windows' error number
            system = (error.errno, error.strerror, *files)
            return cls(OSError, (str(error),) if error.errno is None else system)
        if isinstance(error, ValueError):
            ours = type(error).__module__.startswith("moefold.")
            return cls(type(error) if ours else ValueError, (str(error),))
        if isinstance(error, Failure):
            return cls(type(error), (str(error),))
        return None

    def rebuild(self) -> Exception:
        """Rebuild the error, without its type's ``__init__``, which may have other parameters."""
        return self.kind.__new__(self.kind, *self.args)


class WorkerResult(NamedTuple):
    """A rank's final message to the launcher."""

    ok: bool
    value: Any
    """The function's result, the traceback, or the launcher's mark of a process that died."""
    time: float
    """Time on the monotonic clock, which all processes of a machine share."""
    error: PicklableError | None = None
    blames_others: bool = False
    """Whether other ranks may have caused the failure, as in an operation with them."""

    @property
    def is_secondary(self) -> bool:
        """Whether the error only reports that another rank failed."""
        return self.error is not None and self.error.kind is FirstRankFailed


class RankMemory:
    """Shared memory that a rank writes and the launcher holds, so that it outlives the rank.

    The first page has counters for the launcher, the rest is the rank's. The memory is an unnamed
    file, which the system frees with the last process that has it open.
    """

    def __init__(self, file: int) -> None:
        """Map the counters of an open file, given its descriptor."""
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
        return _map_memory, (DupFd(self.file),)

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


def _map_memory(file: Any) -> RankMemory:
    return RankMemory(file.detach())


class RankLoss(NamedTuple):
    """Why an attempt ended."""

    ranks: tuple[int, ...]
    """Ranks that died."""
    reason: str
    detected_at: float
    """When the launcher noticed, in seconds since the epoch."""


class Attempt(NamedTuple):
    """An attempt of ``launch_elastic``, as one rank receives it."""

    memory: RankMemory
    number: int
    """Number of earlier attempts."""
    loss: RankLoss | None
    """Why the previous attempt ended; None in the first."""

    def report_stored(self, step: int) -> None:
        """Report to the launcher that the state after ``step`` is stored; unblock stop signals.

        Signals during a restart stay pending until then.
        """
        counters = self.memory.counters
        counters[STEPS] = step + 1
        if counters[ATTEMPTS] <= self.number:
            counters[ATTEMPTS] = self.number + 1
            unblock_signals()


class RankTask(NamedTuple):
    """What a rank's process runs."""

    info: RankInfo
    time_out_s: float
    device: str
    threads: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    attempt: "Attempt | None"
    """For an elastic launch, else None."""


class RankProcess:
    """The launcher's handle to a rank's process.

    Two pipes connect them: the rank sends its result through one, and the launcher closes the other
    to release the rank; it also closes when the launcher dies.

    Raises:
        OSError: if the server that ranks fork from has ended.
    """

    def __init__(self, context: Any, task: RankTask) -> None:
        server = server_pid()
        if server is None:
            raise ChildProcessError(SERVER_GONE)
        self.result, send_end = context.Pipe(duplex=False)
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_run_rank, args=(PluginImports(), server, task, send_end, lifeline)
        )
        self.process.start()
        send_end.close()
        lifeline.close()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):  # It ended, and the server has not reported it yet.
                os.kill(self.process.pid, number)

    def describe_exit(self) -> str:
        """Return how the process died, to complete a sentence that begins with its rank."""
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code == SERVER_LOST and server_pid() is None:
            return f"died, as {SERVER_GONE}"
        if code is not None and code < 0:
            return f"was killed by {_describe_signal(-code)}"
        if code is None:
            return "ended, and the process that ranks fork from does not answer"
        return f"died with exit status {code} and no error message"

    def release(self) -> None:
        """Release a rank that has sent its result, and wait briefly for its exit."""
        self._lifeline.close()
        self.process.join(GRACE_S)

    def kill(self) -> None:
        """Kill the process and wait for its exit, and for its server's if that does not report."""
        self.process.kill()
        self.process.join(GRACE_S)
        if self.process.exitcode is None:
            kill_server()
            self.process.join(GRACE_S)
        self._lifeline.close()
        self.result.close()


def _describe_signal(number: int) -> str:
    """Return a signal's name, with the usual cause where users cannot know it."""
    name = signal.Signals(number).name
    causes: dict[int, str] = {
        signal.SIGKILL: "the kernel does that when memory is used up",
        signal.SIGABRT: "a library ended the process, as some do when memory is used up",
    }
    return f"{name} ({causes[number]})" if number in causes else name


def _run_rank(
    plugins: object, server: int, task: RankTask, result: Connection, lifeline: Connection
) -> None:
    """Run a rank: join the others, call the function, send the result, wait for the release.

    ``plugins`` is unpickled first: it imports plug-ins, whose classes ``task`` may refer to.
    ``server`` is the id of the process that this one was forked from.
    """
    signal_when_parent_ends(server)
    os.setpgrp()
    # The server's imports are never freed; collecting them takes longer than everything else.
    gc.freeze()
    torch.set_num_threads(task.threads)
    released = threading.Event()
    joined = False
    threading.Thread(
        target=_send_heartbeats, args=(lifeline, released, task.attempt), daemon=True
    ).start()
    try:
        if task.attempt is None or not task.attempt.number:
            unblock_signals()
        join(task.info, task.time_out_s, task.device)
        joined = True
        value = task.function(task.info, *task.args)
        result.send(WorkerResult(True, value, time.monotonic()))
    except BaseException as caught:
        error = caught
        if is_out_of_memory(caught):
            shortage = describe_shortage(caught)
            error = OutOfMemory(f"rank {task.info.rank} has no memory left: {shortage}")
        waited = IN_OPERATION in getattr(error, "__notes__", ())
        alone = not joined and isinstance(error, RuntimeError)
        blames_others = alone or waited or isinstance(error, FirstRankFailed)
        failure = traceback.format_exc(), time.monotonic(), PicklableError.of(error), blames_others
        with suppress(OSError):  # An interrupted launcher may have exited.
            result.send(WorkerResult(False, *failure))
    released.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    # No teardown: it would wait for a failed group.
    os._exit(0)


def _send_heartbeats(
    lifeline: Connection, released: threading.Event, attempt: Attempt | None
) -> None:
    """Send heartbeats until the launcher closes its end or dies; then end the process."""
    try:
        while not lifeline.poll(None if attempt is None else POLL_S):
            if attempt is not None:
                attempt.memory.counters[BEATS] += 1
        lifeline.recv()
    except (EOFError, OSError):
        released.set()
        time.sleep(ORPHAN_S)
        os._exit(1)
