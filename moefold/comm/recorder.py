"""Recorder of a rank's communication: its last operations, and exact bytes by call site."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

FORWARD, BACKWARD = "forward", "backward"
KEPT = 256


class Site(NamedTuple):
    """A call site, by which operations are counted and proofs inject faults."""

    label: str
    """The module that makes the call; in backward, that of the forward call."""
    op: str
    group: str
    direction: str = FORWARD


class CallRecord(NamedTuple):
    """One operation of this rank."""

    channel: str
    """Name of the set of ranks that take part, equal on all of them."""
    number: int
    """Position among the channel's operations, from 1; equal on all its ranks."""
    site: Site
    shape: tuple[int, ...]
    """Shape of this rank's input; for a receive, of the expected tensor."""
    dtype: str
    bytes: int
    """Bytes that this rank sends to others in the cheapest form of the operation."""

    @property
    def words(self) -> str:
        """The operation in words."""
        label = self.site.label or "no module"
        back = ", backward" if self.site.direction == BACKWARD else ""
        shape = f"{self.dtype}{list(self.shape)}"
        return f"#{self.number} {self.site.op} of {self.channel} in {label}{back}, {shape}"


class Total(NamedTuple):
    """Calls of one call site so far, and the bytes that this rank sent in them."""

    calls: int
    bytes: int


class Open(NamedTuple):
    """An operation that has begun and not ended."""

    record: CallRecord
    ranks: tuple[int, ...]
    since: float
    waited_for: bool
    """Whether the rank is blocked until the operation ends."""


Alter = Callable[[CallRecord, Tensor, Tensor], Tensor]
Mark = Callable[[], Callable[[], bool]]


class Recorder:
    """The operations of one rank, for proofs, counts and reports of hangs.

    ``alter`` injects a fault, to show that a proof detects it: it is called with the record, the
    result, and the result without contributions of other ranks (own rows repeated, a sum of one);
    its return value, of the same shape, replaces the result.

    ``waited_s`` is the total of seconds in which this rank was blocked waiting for others.
    """

    def __init__(self, mark: Mark | None = None) -> None:
        """Keep the last ``KEPT`` operations, and totals of all.

        ``mark`` is for a device that executes operations asynchronously: it marks the end of the
        queued work and returns a function that says whether the device has reached it.
        """
        self._labels = threading.local()
        self.alter: Alter | None = None
        self.totals: dict[Site, Total] = {}
        self.waited_s = 0.0
        self._last: deque[CallRecord] = deque(maxlen=KEPT)
        self._begun: dict[str, int] = {}
        self._open: dict[tuple[str, int], Open] = {}
        self._mark = mark
        self._behind: dict[str, tuple[Open, Callable[[], bool]]] = {}
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """The module under which this thread's operations are recorded."""
        return getattr(self._labels, "now", "")

    @contextmanager
    def module(self, label: str) -> Iterator[None]:
        """Label operations called inside the context, and their backward whenever it runs."""
        before = self.label
        self._labels.now = label
        try:
            yield
        finally:
            self._labels.now = before

    def begin(
        self,
        site: Site,
        channel: str,
        ranks: tuple[int, ...],
        given: Tensor,
        bytes_sent: int,
        waits: bool,
    ) -> CallRecord:
        """Record the start of an operation, and whether the rank is blocked until its ``end``."""
        with self._lock:
            number = self._begun.get(channel, 0) + 1
            self._begun[channel] = number
            dtype = str(given.dtype).removeprefix("torch.")
            record = CallRecord(channel, number, site, tuple(given.shape), dtype, bytes_sent)
            calls, total = self.totals.get(site, (0, 0))
            self.totals[site] = Total(calls + 1, total + bytes_sent)
            self._last.append(record)
            self._open[channel, number] = Open(record, ranks, time.monotonic(), waits)
        return record

    def wait(self, record: CallRecord) -> None:
        """Record that the rank is blocked from now on until an operation ends."""
        place = (record.channel, record.number)
        with self._lock:
            if place in self._open:
                waited = self._open[place]._replace(since=time.monotonic(), waited_for=True)
                self._open[place] = waited

    def end(self, record: CallRecord) -> None:
        """Record the end of an operation on this rank."""
        with self._lock:
            held = self._open.pop((record.channel, record.number), None)
            if held is not None and held.waited_for:
                self.waited_s += time.monotonic() - held.since
            if held is not None and self._mark is not None:
                self._behind[record.channel] = held, self._mark()

    def last(self, count: int = KEPT) -> list[CallRecord]:
        """Return the last operations, oldest first."""
        with self._lock:
            return list(self._last)[-count:]

    def begun(self) -> dict[str, int]:
        """Return the number of operations begun on each channel."""
        with self._lock:
            return dict(self._begun)

    @property
    def in_operation(self) -> bool:
        """Whether this rank is blocked in an operation, or was when the operation failed."""
        with self._lock:
            return any(held.waited_for for held in self._open.values())

    def waiting(self) -> list[Open]:
        """Return the operations that this rank or its device waits for, oldest first."""
        with self._lock:
            waiting = [held for held in self._open.values() if held.waited_for]
            waiting += [held for held, is_past in self._behind.values() if not is_past()]
            return sorted(waiting, key=lambda held: held.since)

    def clear(self) -> None:
        """Reset totals; operation numbers continue."""
        with self._lock:
            self.totals = {}
