"""What a rank said to others: its last operations in order, and exact bytes by call-site."""

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
    """A call-site: what a proof can break and a count is kept for."""

    label: str
    """The module that the call is made for; in backward, that of the forward call."""
    op: str
    group: str
    direction: str = FORWARD


class CallRecord(NamedTuple):
    """One operation of this rank."""

    channel: str
    """Names the ranks that take part, alike on all of them and on no others."""
    number: int
    """Its place among this channel's operations, from 1: the same on all ranks of the channel."""
    site: Site
    shape: tuple[int, ...]
    """What this rank puts in; for a receive, what it expects."""
    dtype: str
    bytes: int
    """What this rank sends to others, as the cheapest form of the operation would."""

    @property
    def words(self) -> str:
        """The operation for a reader."""
        label = self.site.label or "no module"
        back = ", backward" if self.site.direction == BACKWARD else ""
        shape = f"{self.dtype}{list(self.shape)}"
        return f"#{self.number} {self.site.op} of {self.channel} in {label}{back}, {shape}"


class Total(NamedTuple):
    """Calls of one call-site so far, and the bytes this rank sent in them."""

    calls: int
    bytes: int


class Open(NamedTuple):
    """An operation that has begun and not ended: since when, and who takes part."""

    record: CallRecord
    ranks: tuple[int, ...]
    since: float
    waited_for: bool
    """Whether the rank can do nothing else until it ends."""


Alter = Callable[[CallRecord, Tensor, Tensor], Tensor]
Mark = Callable[[], Callable[[], bool]]


class Recorder:
    """The operations of one rank, for proofs, counts and reports of hangs.

    ``alter`` breaks an operation on purpose, which shows that a proof notices: it is called with
    the record, the result, and what the result would be had no other rank taken part (own rows
    repeated, a sum of one); what it returns is used instead, in the same shape.

    ``waited_s`` adds up the seconds in which this rank could do nothing but wait for others.
    """

    def __init__(self, mark: Mark | None = None) -> None:
        """Keep the last ``KEPT`` operations; totals are kept for all.

        ``mark`` is for a device that executes operations after the call has returned: it marks the
        end of what is queued, and what it returns says whether the device is past it.
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
        """The module that this thread works for."""
        return getattr(self._labels, "now", "")

    @contextmanager
    def module(self, label: str) -> Iterator[None]:
        """Label the operations made inside, and their backward whenever it runs."""
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
        """Note that an operation starts, and whether the rank waits until its ``end``."""
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
        """Note that the rank does nothing else until an operation ends."""
        place = (record.channel, record.number)
        with self._lock:
            if place in self._open:
                waited = self._open[place]._replace(since=time.monotonic(), waited_for=True)
                self._open[place] = waited

    def end(self, record: CallRecord) -> None:
        """Note that an operation is over for this rank."""
        with self._lock:
            held = self._open.pop((record.channel, record.number), None)
            if held is not None and held.waited_for:
                self.waited_s += time.monotonic() - held.since
            if held is not None and self._mark is not None:
                self._behind[record.channel] = held, self._mark()

    def last(self, count: int = KEPT) -> list[CallRecord]:
        """Return the last operations, the oldest first."""
        with self._lock:
            return list(self._last)[-count:]

    def begun(self) -> dict[str, int]:
        """Return how many operations of each channel have begun."""
        with self._lock:
            return dict(self._begun)

    @property
    def in_operation(self) -> bool:
        """Whether an operation has begun that this rank waits for, or waited for when it failed."""
        with self._lock:
            return any(held.waited_for for held in self._open.values())

    def waiting(self) -> list[Open]:
        """Return the operations that this rank or its device waits for, the oldest first."""
        with self._lock:
            waiting = [held for held in self._open.values() if held.waited_for]
            waiting += [held for held, is_past in self._behind.values() if not is_past()]
            return sorted(waiting, key=lambda held: held.since)

    def clear(self) -> None:
        """Forget totals; the numbers of operations go on."""
        with self._lock:
            self.totals = {}
