"""Copies of valid rows to pages, between pages, and from pages, with one Triton kernel.

Names are those of :mod:`moefold.kernels.pages.ring`.
"""

from torch import Tensor

from moefold.kernels.fused import Op, jit, row_grid, tl


@jit
def _move(
    source, target, pages, into_pages, count,
    pages_end, into_pages_end, width,
    PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the valid rows; on a side without pages rows are consecutive."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = row < tl.load(count)
    from_row = row
    to_row = row
    mask = valid
    if pages is not None:
        page = tl.load(pages + row // PAGE, mask=valid, other=pages_end)
        from_row = page * PAGE + row % PAGE
        mask = page < pages_end
    if into_pages is not None:
        page = tl.load(into_pages + row // PAGE, mask=valid, other=into_pages_end)
        # Rows without a page are not copied.
        mask = page < into_pages_end if pages is None else mask & (page < into_pages_end)
        to_row = page * PAGE + row % PAGE
    mask = mask[:, None] & (column < width)[None, :]
    value = tl.load(source + from_row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(target + to_row[:, None] * width + column[None, :], value, mask=mask)


def pages_to_pages(
    rows_SD: Tensor, page_M: Tensor, into_M: Tensor, count_1: Tensor, into_SD: Tensor, page: int
) -> None:
    """Copy the first ``count_1`` rows from their pages into pages of ``into_SD``.

    Either may be in pinned host memory.
    """
    _launch(rows_SD, into_SD, page_M, into_M, count_1, page_M.shape[0] * page, page)


def rows_to_pages(
    x_RD: Tensor, page_M: Tensor, count_1: Tensor, rows_SD: Tensor, page: int
) -> None:
    """Copy the first ``count_1`` rows into their pages of ``rows_SD``."""
    _launch(x_RD.contiguous(), rows_SD, None, page_M, count_1, x_RD.shape[0], page)


def rows_from_pages(
    rows_SD: Tensor, page_M: Tensor, count_1: Tensor, room: int, page: int
) -> Tensor:
    """Return ``room`` rows: those in the pages, followed by unspecified ones."""
    x_RD = _empty_rows(rows_SD, page_M, count_1, room, page)
    _launch(rows_SD, x_RD, page_M, None, count_1, room, page)
    return x_RD


def _launch(
    source: Tensor,
    target: Tensor,
    page_M: Tensor | None,
    into_M: Tensor | None,
    count_1: Tensor,
    rows: int,
    page: int,
) -> None:
    width = source.shape[1]
    grid, block = row_grid(rows, width)
    ends = [side.shape[0] // page - 1 for side in (source, target)]
    if rows * width:
        _move[grid](source, target, page_M, into_M, count_1, *ends, width, page, *block)


def _empty_rows(rows_SD: Tensor, page_M: Tensor, count_1: Tensor, room: int, page: int) -> Tensor:
    return rows_SD.new_empty(room, rows_SD.shape[1])


copy = Op(pages_to_pages, mutates_args=("into_SD",))
put = Op(rows_to_pages, mutates_args=("rows_SD",))
take = Op(rows_from_pages, _empty_rows)
