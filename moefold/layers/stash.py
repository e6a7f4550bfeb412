"""Paged stash: saves experts' rows for backward in pages on the device, without unused rows.

A dispatcher of fixed shapes gives experts a buffer for the most rows that any layer may receive.
Only valid rows are saved, in pages (:mod:`moefold.kernels.pages.ring`), enough for all layers and
micro-batches in flight together; the full buffer exists only for the running layer.

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
from moefold.offload.slots import AsyncCopies

RowFormat = tuple[int, torch.dtype]
"""Width and dtype of a row."""
SpillTarget = tuple[Callable[[int], None], int]
"""A function that prefetches a layer and those read next, and the layer's number."""


class Pages(NamedTuple):
    """Numbers of pages on the device and on the host, by bytes per row."""

    device: Mapping[int, int]
    host: Mapping[int, int]


class PagedStash:
    """All pages of a rank, by the format of their rows.

    Args:
        record: rows per page, and the share of layers that spill.
        device: device of the rows.
        in_flight: most layers that are being copied to the host at once.

    Attributes:
        rings: pages on the device.
        host: pages on the host.
        copies: copies between the two; ``in_progress`` lists those of this step.
        step: number of the step; rows of earlier steps are invalid.
    """

    def __init__(self, record: OffloadToPages, device: torch.device, in_flight: int = 1) -> None:
        self.record = record
        self._device = device
        self._in_flight = in_flight
        self.rings: dict[RowFormat, PageRing] = {}
        self.host: dict[RowFormat, PageRing] = {}
        self.copies = AsyncCopies(device)
        self.in_progress = list[Future[None]]()
        self._pages = Pages({}, {})
        self._known: dict[Hashable, Pages] = {}
        self._spilling: deque[tuple[SpillTarget, list[ref[PagedRows]]]] = deque()
        self.step = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the stash on the device."""
        device = [tensor for ring in self.rings.values() for tensor in ring.tensors]
        return device + [tensor for ring in self.host.values() for tensor in ring.tensors[1:]]

    def begin_step(self, key: Hashable, pages: Callable[[], Pages]) -> None:
        """Discard all rows, and allocate the numbers of ``pages()``, computed once per ``key``."""
        for copy in self.in_progress:
            copy.exception()  # wait for copies of an abandoned step, which would overwrite rows
        self.in_progress.clear()
        if key not in self._known:
            self._known[key] = pages()
        if self._known[key] is not self._pages:
            self._pages = self._known[key]
            self.rings.clear()
            self.host.clear()
        for ring in (*self.rings.values(), *self.host.values()):
            ring.clear()
        self._spilling.clear()
        self.step += 1

    def save(
        self, x_RD: Tensor, ends_E: Tensor, spill: SpillTarget | None = None
    ) -> "PagedRows | None":
        """Save the valid rows of a buffer, whose number is the last of ``ends_E``.

        Returns None if there are no pages of this size. With ``spill`` they move to the host.
        """
        width = prod(x_RD.shape[1:])
        size = width * x_RD.element_size()
        row_format = (width, x_RD.dtype)
        if not self._pages.device.get(size):
            return None
        args = self.record.page, *row_format, self._device
        if row_format not in self.rings:
            self.rings[row_format] = PageRing(self._pages.device[size], *args)
        if spill is None:
            return PagedRows(self, row_format, x_RD, ends_E)
        if row_format not in self.host:
            self.host[row_format] = PageRing(self._pages.host[size], *args, on_host=True)
        if not self._spilling or self._spilling[-1][0] != spill:
            if len(self._spilling) == self._in_flight:
                for reference in self._spilling.popleft()[1]:
                    if (rows := reference()) is not None:
                        rows.wait_offloaded()
            self._spilling.append((spill, []))
        rows = PagedRows(self, row_format, x_RD, ends_E, spill)
        self._spilling[-1][1].append(ref(rows))
        return rows

    def shortage(self) -> Tensor:
        """Return the largest relative shortage of pages over formats, in thousandths."""
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        rings = (*self.rings.values(), *self.host.values())
        shortages = ((ring.refused * 1000 + ring.pages - 1) // ring.pages for ring in rings)
        return torch.stack([zero, *shortages]).amax()


class PagedRows:
    """Rows saved in pages, which are freed once the rows are loaded or dropped."""

    def __init__(
        self,
        stash: PagedStash,
        row_format: RowFormat,
        x_RD: Tensor,
        ends_E: Tensor,
        spill: SpillTarget | None = None,
    ) -> None:
        self._stash = stash
        self._ring = stash.rings[row_format]
        self._step = 0
        self._ends_E = ends_E
        self._capacity = x_RD.shape[0]
        self._spill = spill
        self._loaded: Tensor | None = None
        self._copy_done: Future[None] | None = None
        self._page_M = self._ring.put(x_RD.detach().reshape(self._capacity, -1), ends_E[-1])
        self._on_device = True
        self._leaves_device = spill is not None
        if spill is not None:
            self._host = stash.host[row_format]
            self._host_M = self._host.allocate(ends_E[-1], self._capacity)
            self._copy(self._ring, self._page_M, self._host, self._host_M)
        self._step = stash.step

    def __del__(self) -> None:
        """Free the pages of rows that were never loaded."""
        self.wait_fetched()
        if self._loaded is None and self._step == self._stash.step:
            self._free()

    def wait_offloaded(self) -> None:
        """Free the device pages after the copy to the host, unless the rows were prefetched."""
        if self._leaves_device:
            self.wait_fetched()
            self._ring.free(self._page_M)
            self._on_device = self._leaves_device = False

    def prefetch(self) -> None:
        """Start to copy spilled rows back to the device."""
        self._leaves_device = False
        if not self._on_device:
            self._page_M = self._ring.allocate(self._ends_E[-1], self._capacity)
            self._copy(self._host, self._host_M, self._ring, self._page_M)
            self._on_device = True

    def wait_fetched(self) -> None:
        """Wait for the copy in progress, if any."""
        if self._copy_done is not None:
            self._copy_done.result()

    def load(self) -> Tensor:
        """Return the rows in a buffer of their original size, and free their pages."""
        if self._loaded is None:
            if self._spill is not None:
                fetch, layer = self._spill
                fetch(layer)
                self.prefetch()
                self.wait_fetched()
            self._loaded = self._ring.take(self._page_M, self._ends_E[-1], self._capacity)
            self._on_device = False
            self._free()
            del self._page_M
        return self._loaded

    def _copy(self, source: PageRing, page_M: Tensor, target: PageRing, into_M: Tensor) -> None:
        args = page_M, self._ends_E[-1], target, into_M
        self._copy_done = self._stash.copies.start(lambda: source.copy(*args))
        self._stash.in_progress.append(self._copy_done)

    def _free(self) -> None:
        if self._on_device:
            self._ring.free(self._page_M)
        if self._spill is not None:
            self._host.free(self._host_M)
            del self._host_M
