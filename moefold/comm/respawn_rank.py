"""A rank that may outlive others: it leaves their groups and meets whoever takes their place.

gloo has no way to give up an operation. But most whose connections are cut fail at once, on every
thread; the others are left to end by themselves, and their groups with them.
"""

import gc
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moefold.comm.agree import FirstFailed
from moefold.comm.environment import Spot
from moefold.comm.interrupt import listen
from moefold.comm.join import join
from moefold.comm.launch import FORWARDED, ORPHAN_S, Answer, Raised
from moefold.comm.waits import WAITS
from moefold.comm.world import IN_OPERATION

AGAIN_S = 0.05


class Out(NamedTuple):
    """A rank waits to meet the others."""

    error: str
    """What ended the last attempt; empty at a rank's start."""
    blames_others: bool
    """Whether others may have caused that: it was in an operation with them."""
    raised: Raised | None = None
    """What ended it, where that is for people."""


class Ready(NamedTuple):
    """A rank is back in step."""

    step: int


class Loss(NamedTuple):
    """Why an attempt ended."""

    ranks: tuple[int, ...]
    """Those that were started anew."""
    why: str
    noticed: float
    """When the launcher saw it, in seconds since the epoch."""


class Meet(NamedTuple):
    """The launcher's word to meet; ``loss`` is why, None at the first time."""

    spot: Spot
    loss: Loss | None


class Cut(NamedTuple):
    """The launcher's word to leave an attempt."""


class Line:
    """A rank's line to the launcher. It carries a function through attempt after attempt.

    Attributes:
        meeting: the present attempt.
        over: set when the launcher lets this rank go.
    """

    def __init__(self, up: Connection, down: Connection, time_out_s: float) -> None:
        """Listen to the launcher."""
        self.meeting = Meet(Spot(0, 1, 0, "", 0), None)
        self.over = threading.Event()
        self._up, self._time_out_s = up, time_out_s
        self._meetings: queue.SimpleQueue[Meet] = queue.SimpleQueue()
        self._inside = threading.Event()
        self._others: frozenset[int] = frozenset()
        self._noted: set[int] = set()
        threading.Thread(target=self._listen, args=(down,), name="line", daemon=True).start()

    def through(self, function: Callable[[Spot], Any]) -> Any:
        """Meet the others and call ``function(spot)``, again after each attempt that failed.

        Whether one that failed is worth another is the launcher's to say: it ends the rank if not.
        What a function leaves behind is dropped before the next attempt.
        """
        out = Out("", False)
        with self._noting():
            while True:
                self._up.send(out)
                self.meeting = self._meetings.get()
                joined = False
                WAITS.may_leave()
                self._others = connections()
                self._inside.set()
                try:
                    join(self.meeting.spot, self._time_out_s)
                    joined = True
                    return function(self.meeting.spot)
                except Exception as error:
                    in_operation = IN_OPERATION in getattr(error, "__notes__", ())
                    blames_others = not joined or in_operation or isinstance(error, FirstFailed)
                    out = Out(traceback.format_exc(), blames_others, Raised.of(error))
                    # Before the buffers are gone that others may still write into.
                    self._cut()
                finally:
                    self._inside.clear()
                self._leave()

    def ready(self, step: int) -> None:
        """Tell the launcher that this rank is in step; take the signals that came meanwhile."""
        self._up.send(Ready(step))
        noted, self._noted = self._noted, set()
        for number in noted:
            signal.raise_signal(number)

    def _cut(self) -> None:
        """End the attempt's operations, on whichever thread."""
        cut(self._others)
        WAITS.leave()

    def _leave(self) -> None:
        """Drop the attempt's groups, waiting for nobody, and everything that hung on it."""
        made = dist.distributed_c10d._world.pg_map
        groups = [group for group, (backend, _) in made.items() if backend == "gloo"]
        with suppress(Exception):
            dist.destroy_process_group()
        gc.collect()
        # A group ends when its operations have, and whoever drops it last waits for that; an old
        # graph may be that one. Held for a time-out, none of them has an operation left.
        last = threading.Timer(self._time_out_s, groups.clear)
        last.daemon = True
        last.start()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep signals for when the rank is in step; a second one of a kind ends the process."""

        def note(number: int, frame: FrameType | None) -> None:
            if number in self._noted:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._noted.add(number)

        before = {number: signal.signal(number, note) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self, down: Connection) -> None:
        """Do as the launcher says; nobody outlives it."""
        try:
            while True:
                word = down.recv()
                if isinstance(word, Meet):
                    self._meetings.put(word)
                while isinstance(word, Cut) and self._inside.is_set():
                    self._cut()
                    time.sleep(AGAIN_S)
        except (EOFError, OSError):
            self.over.set()
            time.sleep(ORPHAN_S)
            os._exit(1)


def connections() -> frozenset[int]:
    """Return the TCP connections of this process, by their numbers at the kernel."""
    return frozenset(number for number, _ in _connections())


def cut(others: frozenset[int] = frozenset()) -> None:
    """Cut this process's TCP connections, but for ``others``: what waits for a peer fails now."""
    for number, descriptor in _connections():
        if number in others:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, int]]:
    """Yield (number, descriptor) of each socket of the internet's kinds."""
    for entry in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with suppress(OSError):
            found = os.fstat(int(entry))
            if stat.S_ISSOCK(found.st_mode):
                end = socket.socket(fileno=int(entry))
                family = end.family
                end.detach()
                if family in (socket.AF_INET, socket.AF_INET6):
                    yield found.st_ino, int(entry)


def run_rank(task: tuple[Any, ...], up: Connection, down: Connection) -> None:
    """Be a rank: call ``function(line, *args)``, answer, and stay until the launcher ends."""
    time_out_s, threads, function, args = task
    os.setpgrp()
    # What the server has loaded stays for good; looking through it takes longer than all else.
    gc.freeze()
    torch.set_num_threads(threads)
    line = Line(up, down, time_out_s)
    try:
        listen()
        up.send(Answer(True, function(line, *args), time.monotonic()))
    except BaseException as error:
        with suppress(OSError):  # A launcher that was interrupted may be gone.
            up.send(Answer(False, traceback.format_exc(), time.monotonic(), Raised.of(error)))
    line.over.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
