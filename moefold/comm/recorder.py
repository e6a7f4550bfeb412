"""Recorder of a rank's communication: its last operations, and exact bytes per call site."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

FORWARD = "forward"
BACKWARD = "backward"
MAX_RECORDS = 256
POINT_TO_POINT = ("send", "receive")
"""Operations of two ranks."""


class CallSite(NamedTuple):
    """A call site: operations are counted, and proofs inject faults, per site."""

    label: str
    """The calling module; in backward, that of the forward call."""
    op: str
    group: str
    direction: str = FORWARD


class CallRecord(NamedTuple):
    """One operation of this rank."""

    channel: str
    """Name of the set of ranks that take part, equal on all of them."""
    number: int
    """Index among the channel's operations, from 1; equal on all its ranks."""
    site: CallSite
    shape: tuple[int, ...]
    """Shape of this rank's input, or of the tensor to receive."""
    dtype: str
    bytes: int
    """Bytes that this rank sends to others in the cheapest form of the operation."""

    @property
    def description(self) -> str:
        """One line that describes the operation."""
        label = self.site.label or "no module"
        back = ", backward" if self.site.direction == BACKWARD else ""
        shape = f"{self.dtype}{list(self.shape)}"
        return f"#{self.number} {self.site.op} of {self.channel} in {label}{back}, {shape}"


class Total(NamedTuple):
    """Calls at one call site so far, and the bytes that this rank sent in them."""

    calls: int
    bytes: int


class OpenCall(NamedTuple):
    """An operation that has begun and not ended."""

    record: CallRecord
    ranks: tuple[int, ...]
    since: float
    blocking: bool
    """Whether the rank is blocked until the operation ends."""
    begun: float
    """When it began; ``since`` is later if the rank went on with other work at first."""

    @property
    def key(self) -> tuple[str, int]:
        """Name of the operation, equal on all its ranks."""
        return self.record.channel, self.record.number


class TimedCall(NamedTuple):
    """A completed operation of this rank on its timeline, in seconds of ``time.monotonic``."""

    call: OpenCall
    ended: float
    thread: int
    """The thread that was blocked until the end, or ended the operation."""


FaultInjector = Callable[[CallRecord, Tensor, Tensor], Tensor]
DeviceMarker = Callable[[], Callable[[], bool]]


class Recorder:
    """Records the operations of one rank, for proofs, counts and reports of hangs.

    ``inject_fault`` shows that a proof detects a fault: it is called with the record, the result,
    and the result without contributions of other ranks (own rows repeated, a sum of one); its
    return value, of the same shape, replaces the result.

    ``waited_s`` is the total of seconds in which this rank was blocked waiting for others.
    ``timeline``, if set to a list, collects the operations that end, until ``stop_timeline``.
    """

    def __init__(self, mark: DeviceMarker | None = None) -> None:
        """Keep the last ``MAX_RECORDS`` operations, and totals of all.

        ``mark`` is for a device that executes operations asynchronously: it marks the end of the
        queued work, and returns a function that returns whether the device has reached the mark.
        """
        self._labels = threading.local()
        self.inject_fault: FaultInjector | None = None
        self.totals: dict[CallSite, Total] = {}
        self.waited_s = 0.0
        self.timeline: list[TimedCall] | None = None
        self._works: dict[tuple[str, int], Sequence[Any]] = {}
        self._last: deque[CallRecord] = deque(maxlen=MAX_RECORDS)
        self._begun_counts: dict[str, int] = {}
        self._open: dict[tuple[str, int], OpenCall] = {}
        self._mark = mark
        self._on_device: dict[str, tuple[OpenCall, Callable[[], bool]]] = {}
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """The module under which this thread's operations are recorded."""
        return getattr(self._labels, "now", "")

    @contextmanager
    def module(self, label: str) -> Iterator[None]:
        """Label operations called in this context, and their backward whenever it runs."""
        outer = self.label
        self._labels.now = label
        try:
            yield
        finally:
            self._labels.now = outer

    def begin(
        self,
        site: CallSite,
        channel: str,
        ranks: tuple[int, ...],
        tensor: Tensor,
        bytes_sent: int,
        blocking: bool,
    ) -> CallRecord:
        """Record the start of an operation, and whether the rank is blocked until its ``end``."""
        with self._lock:
            number = self._begun_counts.get(channel, 0) + 1
            self._begun_counts[channel] = number
            dtype = str(tensor.dtype).removeprefix("torch.")
            record = CallRecord(channel, number, site, tuple(tensor.shape), dtype, bytes_sent)
            calls, total = self.totals.get(site, (0, 0))
            self.totals[site] = Total(calls + 1, total + bytes_sent)
            self._last.append(record)
            now = time.monotonic()
            self._open[channel, number] = OpenCall(record, ranks, now, blocking, now)
        return record

    def keep(self, record: CallRecord, works: Sequence[Any]) -> None:
        """Keep the back end's works of an operation of all ranks until its end, for a timeline."""
        if self.timeline is not None and record.site.op not in POINT_TO_POINT:
            self._works[record.channel, record.number] = works

    def stop_timeline(self, waits: bool = True) -> list[TimedCall]:
        """Return the timeline and collect no more, once no work of the back end is under way.

        A profiler must not stop before: threads of the back end still write into its trace.
        ``waits`` is false where the ranks have failed, so that works may never end.
        """
        for work in chain.from_iterable(self._works.values()) if waits else ():
            work.wait()
        self._works.clear()
        collected = self.timeline or []
        self.timeline = None
        return collected

    def wait(self, record: CallRecord) -> None:
        """Record that the rank is blocked from now until an operation ends."""
        key = (record.channel, record.number)
        with self._lock:
            if key in self._open:
                call = self._open[key]._replace(since=time.monotonic(), blocking=True)
                self._open[key] = call

    def end(self, record: CallRecord) -> None:
        """Record the end of an operation on this rank."""
        with self._lock:
            call = self._open.pop((record.channel, record.number), None)
            now = time.monotonic()
            self._works.pop((record.channel, record.number), None)
            if call is not None and call.blocking:
                self.waited_s += now - call.since
            if call is not None and self.timeline is not None:
                self.timeline.append(TimedCall(call, now, threading.get_ident()))
            if call is not None and self._mark is not None:
                self._on_device[record.channel] = call, self._mark()

    def last(self, count: int = MAX_RECORDS) -> list[CallRecord]:
        """Return the last operations, oldest first."""
        with self._lock:
            return list(self._last)[-count:]

    def begun_counts(self) -> dict[str, int]:
        """Return the number of operations begun on each channel."""
        with self._lock:
            return dict(self._begun_counts)

    @property
    def in_operation(self) -> bool:
        """Whether this rank is blocked in an operation, or was when the operation failed."""
        with self._lock:
            return any(call.blocking for call in self._open.values())

    def waiting(self) -> list[OpenCall]:
        """Return the operations that this rank or its device waits for, oldest first."""
        with self._lock:
            waiting = [call for call in self._open.values() if call.blocking]
            waiting += [call for call, is_done in self._on_device.values() if not is_done()]
            return sorted(waiting, key=lambda call: call.since)

    def clear(self) -> None:
        """Reset totals; operation numbers continue."""
        with self._lock:
            self.totals = {}
