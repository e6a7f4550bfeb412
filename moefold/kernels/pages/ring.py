"""Paged storage for the valid rows of buffers of fixed shape, without host reads.

R rows of room, of which the first ``count`` are valid; D columns; M pages, enough for R rows; N
pages in total, with S rows. Free pages are in a ring: storing rows takes pages at its head, freeing
returns them at its tail, in any order. All shapes are static.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import uses_triton
from moefold.kernels.pages import fused as kernels


class PageRing:
    """Pages for rows of one width and dtype.

    Args:
        pages: N.
        page: rows per page.
        width: D.
        dtype: dtype of rows.
        device: device of page numbers, and of rows unless ``on_host``.

    Attributes:
        allocated: int64 total of pages allocated; ``freed`` is the total of pages freed.
        refused: int64 total of pages for which there was no room; their rows are lost.
    """

    def __init__(
        self,
        pages: int,
        page: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        on_host: bool = False,
    ) -> None:
        self.pages = pages
        self.page = page
        # Invalid rows go to one extra page, whose number goes to one extra entry of the ring.
        shape = (pages + 1) * page, width
        if on_host:
            # Pinned, so that a GPU copies without the host.
            self.rows_SD = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        else:
            self.rows_SD = torch.empty(shape, dtype=dtype, device=device)
        self._free_pages = torch.arange(pages + 1, device=device)
        self.allocated, self.freed, self.refused = self._free_pages.new_zeros(3).unbind()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the ring, rows first."""
        return self.rows_SD, self._free_pages, self.allocated

    def clear(self) -> None:
        """Free all pages and reset all counters."""
        torch.arange(self.pages + 1, out=self._free_pages)
        for count in (self.allocated, self.freed, self.refused):
            count.zero_()

    def put(self, x_RD: Tensor, count: Tensor) -> Tensor:
        """Copy the valid rows into free pages; return the page numbers of :meth:`allocate`."""
        page_M = self.allocate(count, x_RD.shape[0])
        if uses_triton(x_RD):
            kernels.put(x_RD, page_M, count.view(1), self.rows_SD, self.page)
        else:
            self.rows_SD.index_copy_(0, self._row_slots(page_M, count, x_RD.shape[0]), x_RD)
        return page_M

    def allocate(self, count: Tensor, room: int) -> Tensor:
        """Allocate pages for the valid rows of a room; return their numbers [M], N for no page.

        If too few are free, none is allocated and ``refused`` grows.
        """
        index_M = torch.arange(-(-room // self.page), device=count.device)
        needed = (count.to(torch.int64) + self.page - 1).div(self.page, rounding_mode="floor")
        fits = needed <= self.pages - (self.allocated - self.freed)
        page_M = self._free_pages.index_select(0, (self.allocated + index_M) % self.pages)
        page_M = torch.where((index_M < needed) & fits, page_M, self.pages)
        self.allocated += torch.where(fits, needed, 0)
        self.refused += torch.where(fits, 0, needed)
        return page_M

    def copy(self, page_M: Tensor, count: Tensor, target: "PageRing", into_M: Tensor) -> None:
        """Copy the valid rows from pages of this ring into pages of another one."""
        if uses_triton(target.rows_SD if self.rows_SD.is_cpu else self.rows_SD):
            args = page_M, into_M, count.view(1), target.rows_SD, self.page
            kernels.copy(self.rows_SD, *args)
        else:
            room = page_M.shape[0] * self.page
            device = target.rows_SD.device
            from_R = self._row_slots(page_M, count, room).to(self.rows_SD.device)
            into_R = target._row_slots(into_M, count, room).to(device)
            target.rows_SD.index_copy_(0, into_R, self.rows_SD.index_select(0, from_R).to(device))

    def take(self, page_M: Tensor, count: Tensor, room: int) -> Tensor:
        """Return ``room`` rows, beginning with the stored ones, and free their pages.

        The other rows are unspecified.
        """
        if uses_triton(self.rows_SD):
            x_RD = kernels.take(self.rows_SD, page_M, count.view(1), room, self.page)
        else:
            x_RD = self.rows_SD.index_select(0, self._row_slots(page_M, count, room))
        self.free(page_M)
        return x_RD

    def free(self, page_M: Tensor) -> None:
        """Free pages."""
        valid_M = page_M < self.pages
        index_M = torch.arange(page_M.shape[0], device=page_M.device)
        entry_M = torch.where(valid_M, (self.freed + index_M) % self.pages, self.pages)
        self._free_pages.index_copy_(0, entry_M, page_M)
        self.freed += valid_M.sum()

    def _row_slots(self, page_M: Tensor, count: Tensor, room: int) -> Tensor:
        """Return the storage row of each row of the room; invalid rows are in the extra page."""
        row_R = torch.arange(room, device=page_M.device)
        page_R = page_M.index_select(0, row_R.div(self.page, rounding_mode="floor"))
        page_R = torch.where(row_R < count, page_R, self.pages)
        return page_R * self.page + row_R % self.page
