"""Paged stash: saves experts' rows for backward in pages on the device, without unused rows.

A dispatcher of fixed shapes gives experts a buffer for the most rows that any layer may receive.
Valid rows are saved in pages (:mod:`moefold.kernels.pages.ring`), of which there are enough for all
layers and micro-batches in flight together; the full buffer exists only for the running layer.

Rows of a chunk's first layers may spill to pages on the host, concurrently with other work. Their
device pages are freed ``in_flight`` layers later, and others are claimed as their backward
approaches. Both follow from the order of layers and passes: no count is read on the host.
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
"""Width and dtype of a row."""
Leaving = tuple[Callable[[int], None], int]
"""A function that prefetches rows of a layer and of those read next, and the layer's number."""


class Pages(NamedTuple):
    """Numbers of pages on device and host, by the bytes of a row."""

    here: Mapping[int, int]
    host: Mapping[int, int]


class PagedStash:
    """All pages of a rank, by the form of their rows.

    Args:
        record: rows per page, and the share of layers that spill.
        device: device of the rows.
        in_flight: most layers that are being copied to the host at once.

    Attributes:
        rings: pages on the device.
        host: pages on the host.
        copies: copies between the two; ``under_way`` lists those of this step.
        step: number of the step; rows of earlier steps are invalid.
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
        """All tensors of the stash on the device."""
        here = [one for ring in self.rings.values() for one in ring.tensors]
        return here + [one for ring in self.host.values() for one in ring.tensors[1:]]

    def begin_step(self, key: Hashable, pages: Callable[[], Pages]) -> None:
        """Discard all rows, and allocate the numbers of ``pages()``, computed once per ``key``."""
        for one in self.under_way:
            one.exception()  # wait for copies of an abandoned step, which would overwrite rows
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
        """Save the valid rows of a buffer, whose number is the last of ``ends_E``.

        Returns None if there are no pages for rows of this size. With ``leaving`` they spill.
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
        """Return the largest relative shortage of pages over forms, in thousandths."""
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        rings = (*self.rings.values(), *self.host.values())
        parts = ((one.refused * 1000 + one.pages - 1) // one.pages for one in rings)
        return torch.stack([none, *parts]).amax()


class PagedRows:
    """Rows saved in pages, which are freed once the rows are read or dropped."""

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
            self._host_M = self._host.allocate(ends_E[-1], self._room)
            self._copy(self._ring, self._page_M, self._host, self._host_M)
        self._step = stash.step

    def __del__(self) -> None:
        """Free pages of rows that were never read."""
        self.arrived()
        if self._back is None and self._step == self._stash.step:
            self._free()

    def left(self) -> None:
        """Free the device pages after the copy to the host, unless the rows are fetched again."""
        if self._goes:
            self.arrived()
            self._ring.free(self._page_M)
            self._here = self._goes = False

    def fetch(self) -> None:
        """Begin to copy spilled rows back to the device."""
        self._goes = False
        if not self._here:
            self._page_M = self._ring.allocate(self._ends_E[-1], self._room)
            self._copy(self._host, self._host_M, self._ring, self._page_M)
            self._here = True

    def arrived(self) -> None:
        """Wait for the copy in progress, if any."""
        if self._copied is not None:
            self._copied.result()

    def take(self) -> Tensor:
        """Return the rows in a buffer of their original size, and free their pages."""
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
            self._ring.free(self._page_M)
        if self._leaving is not None:
            self._host.free(self._host_M)
            del self._host_M
