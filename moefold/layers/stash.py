"""Experts' rows between forward and backward in pages of the device, for as many as came.

A dispatch of fixed shapes hands its experts room for the most rows that are expected of any layer.
What is kept of them lies in pages (:mod:`moefold.kernels.pages.ring`), enough of them for what all
layers and micro-batches in flight have together; room is there for the layer that runs.

Rows of a chunk's first layers may go on to pages of the host, beside other work. Their pages here
are free when so many later layers have come as may be on their way at once, and others are taken as
backward nears them. Both follow from the order of layers and passes: no count is read.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from math import prod
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from moefold.kernels.pages.ring import PageRing
from moefold.layers.config import OffloadToPages
from moefold.offload.slots import Copies

Form = tuple[int, torch.dtype]
"""Of a row."""
Leaving = tuple[Callable[[int], None], int]
"""Begins to bring back the rows of a layer, and of those that are taken next; and the layer."""


class Pages(NamedTuple):
    """Pages by the bytes of a row."""

    here: Mapping[int, int]
    host: Mapping[int, int]


class PagedStash:
    """A rank's pages, by the form of their rows.

    Args:
        record: rows of a page, and what goes on to the host.
        device: of the rows.
        in_flight: layers that are on their way to the host at once.

    Attributes:
        rings: the pages here.
        host: those of the host.
        copies: between both; those ``under_way`` began in this step.
        step: number of the step; what was put in an earlier one is forgotten.
    """

    def __init__(self, record: OffloadToPages, device: torch.device, in_flight: int = 1) -> None:
        self.record, self._device, self._in_flight = record, device, in_flight
        self.rings: dict[Form, PageRing] = {}
        self.host: dict[Form, PageRing] = {}
        self.copies, self.under_way = Copies(device), list[Future[None]]()
        self._pages = Pages({}, {})
        self._known: dict[Hashable, Pages] = {}
        self._out: deque[tuple[Leaving, list[ref[PagedRows]]]] = deque()
        self.step = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of it on the device."""
        here = [one for ring in self.rings.values() for one in ring.tensors]
        return here + [one for ring in self.host.values() for one in ring.tensors[1:]]

    def begin_step(self, key: Hashable, pages: Callable[[], Pages]) -> None:
        """Forget all rows; ``pages`` says how many there are of bytes of a row, once for a key."""
        for one in self.under_way:
            one.exception()  # of a step that was given up: later it would write on other rows
        self.under_way.clear()
        if key not in self._known:
            self._known[key] = pages()
        if self._known[key] is not self._pages:
            self._pages = self._known[key]
            self.rings.clear()
            self.host.clear()
        for ring in (*self.rings.values(), *self.host.values()):
            ring.clear()
        self._out.clear()
        self.step += 1

    def put(
        self, x_RD: Tensor, ends_E: Tensor, leaving: Leaving | None = None
    ) -> "PagedRows | None":
        """Keep the rows of a room, of which the last of ``ends_E`` says how many count.

        None where there are no pages for such rows. With ``leaving`` they go on to the host.
        """
        width = prod(x_RD.shape[1:])
        size, form = width * x_RD.element_size(), (width, x_RD.dtype)
        if not self._pages.here.get(size):
            return None
        given = self.record.page, *form, self._device
        if form not in self.rings:
            self.rings[form] = PageRing(self._pages.here[size], *given)
        if leaving is None:
            return PagedRows(self, form, x_RD, ends_E)
        if form not in self.host:
            self.host[form] = PageRing(self._pages.host[size], *given, on_host=True)
        if not self._out or self._out[-1][0] != leaving:
            if len(self._out) == self._in_flight:
                for one in self._out.popleft()[1]:
                    if (rows := one()) is not None:
                        rows.left()
            self._out.append((leaving, []))
        rows = PagedRows(self, form, x_RD, ends_E, leaving)
        self._out[-1][1].append(ref(rows))
        return rows

    def lacking(self) -> Tensor:
        """Return by how many thousandths of it, at most, the fullest form has too few pages."""
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        rings = (*self.rings.values(), *self.host.values())
        parts = ((one.refused * 1000 + one.pages - 1) // one.pages for one in rings)
        return torch.stack([none, *parts]).amax()


class PagedRows:
    """Rows in pages, as long as something will take them."""

    def __init__(
        self,
        stash: PagedStash,
        form: Form,
        x_RD: Tensor,
        ends_E: Tensor,
        leaving: Leaving | None = None,
    ) -> None:
        self._stash, self._ring, self._step = stash, stash.rings[form], 0
        self._ends_E, self._room, self._leaving = ends_E, x_RD.shape[0], leaving
        self._back: Tensor | None = None
        self._copied: Future[None] | None = None
        self._page_M = self._ring.put(x_RD.detach().reshape(self._room, -1), ends_E[-1])
        self._here, self._goes = True, leaving is not None
        if leaving is not None:
            self._host = stash.host[form]
            self._host_M = self._host.claim(ends_E[-1], self._room)
            self._copy(self._ring, self._page_M, self._host, self._host_M)
        self._step = stash.step

    def __del__(self) -> None:
        """Free pages that nobody took."""
        self.arrived()
        if self._back is None and self._step == self._stash.step:
            self._free()

    def left(self) -> None:
        """Free the pages here once all is on the host, unless that was sent for again."""
        if self._goes:
            self.arrived()
            self._ring.give(self._page_M)
            self._here = self._goes = False

    def fetch(self) -> None:
        """Begin to bring rows back that have left."""
        self._goes = False
        if not self._here:
            self._page_M = self._ring.claim(self._ends_E[-1], self._room)
            self._copy(self._host, self._host_M, self._ring, self._page_M)
            self._here = True

    def arrived(self) -> None:
        """Wait until no copy is under way."""
        if self._copied is not None:
            self._copied.result()

    def take(self) -> Tensor:
        """Return the rows in room of their own; their pages are free."""
        if self._back is None:
            if self._leaving is not None:
                fetch, layer = self._leaving
                fetch(layer)
                self.fetch()
                self.arrived()
            self._back = self._ring.take(self._page_M, self._ends_E[-1], self._room)
            self._here = False
            self._free()
            del self._page_M
        return self._back

    def _copy(self, source: PageRing, page_M: Tensor, to: PageRing, into_M: Tensor) -> None:
        given = page_M, self._ends_E[-1], to, into_M
        self._copied = self._stash.copies.begin(lambda: source.copy(*given))
        self._stash.under_way.append(self._copied)

    def _free(self) -> None:
        if self._here:
            self._ring.give(self._page_M)
        if self._leaving is not None:
            self._host.give(self._host_M)
            del self._host_M
