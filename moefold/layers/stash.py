"""Experts' rows between forward and backward in pages of the device, for as many as came.

A dispatch of fixed shapes hands its experts room for the most rows that are expected of any layer.
What is kept of them lies in pages (:mod:`moefold.kernels.pages.ring`), enough of them for what all
layers and micro-batches in flight have together; room is there for the layer that runs.
"""

from collections.abc import Callable, Hashable, Mapping
from math import prod

import torch
from torch import Tensor

from moefold.kernels.pages.ring import PageRing
from moefold.layers.config import OffloadToPages

Form = tuple[int, torch.dtype]
"""Of a row."""


class PagedStash:
    """A rank's pages, by the form of their rows.

    Attributes:
        step: number of the step; what was put in an earlier one is forgotten.
    """

    def __init__(self, record: OffloadToPages, device: torch.device) -> None:
        self.record, self._device = record, device
        self.rings: dict[Form, PageRing] = {}
        self._pages: Mapping[int, int] = {}
        self._known: dict[Hashable, Mapping[int, int]] = {}
        self.step = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of it."""
        return [one for ring in self.rings.values() for one in ring.tensors]

    def begin_step(self, key: Hashable, pages: Callable[[], Mapping[int, int]]) -> None:
        """Forget all rows; ``pages`` says how many there are of bytes of a row, once for a key."""
        if key not in self._known:
            self._known[key] = pages()
        if self._known[key] is not self._pages:
            self._pages = self._known[key]
            self.rings.clear()
        for ring in self.rings.values():
            ring.clear()
        self.step += 1

    def put(self, x_RD: Tensor, ends_E: Tensor) -> "PagedRows | None":
        """Keep the rows of a room, of which the last of ``ends_E`` says how many count.

        None where there are no pages for such rows.
        """
        width = prod(x_RD.shape[1:])
        pages = self._pages.get(width * x_RD.element_size(), 0)
        if not pages:
            return None
        form = width, x_RD.dtype
        if form not in self.rings:
            self.rings[form] = PageRing(pages, self.record.page, *form, self._device)
        return PagedRows(self, self.rings[form], x_RD, ends_E)

    def lacking(self) -> Tensor:
        """Return by how many thousandths of it, at most, the fullest form has too few pages."""
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        rings = self.rings.values()
        parts = ((one.refused * 1000 + one.pages - 1) // one.pages for one in rings)
        return torch.stack([none, *parts]).amax()


class PagedRows:
    """Rows in pages, as long as something will take them."""

    def __init__(self, stash: PagedStash, ring: PageRing, x_RD: Tensor, ends_E: Tensor) -> None:
        self._stash, self._ring, self._step = stash, ring, 0
        self._ends_E, self._room = ends_E, x_RD.shape[0]
        self._back: Tensor | None = None
        self._page_M = ring.put(x_RD.detach().reshape(self._room, -1), ends_E[-1])
        self._step = stash.step

    def __del__(self) -> None:
        """Free pages that nobody took."""
        if self._back is None and self._step == self._stash.step:
            self._ring.give(self._page_M)

    def take(self) -> Tensor:
        """Return the rows in room of their own; their pages are free."""
        if self._back is None:
            self._back = self._ring.take(self._page_M, self._ends_E[-1], self._room)
            del self._page_M
        return self._back
