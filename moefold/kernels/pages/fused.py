"""Rows to their pages, to others and back as one Triton kernel each, which moves those that count.

Names as in :mod:`moefold.kernels.pages.ring`.
"""

from torch import Tensor

from moefold.kernels.fused import Op, jit, row_blocks, tl


@jit
def _move(
    x, pages, page, count, number, width, PAGE: tl.constexpr, PUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counts = row < tl.load(count)
    page = tl.load(page + row // PAGE, mask=counts, other=number)
    there = (page < number)[:, None] & (column < width)[None, :]
    room = x + row[:, None] * width + column[None, :]
    stored = pages + (page * PAGE + row % PAGE)[:, None] * width + column[None, :]
    if PUT:
        tl.store(stored, tl.load(room, mask=there, other=0.0), mask=there)
    else:
        tl.store(room, tl.load(stored, mask=there, other=0.0), mask=there)


@jit
def _copy(
    pages, into, page, into_page, count, number, into_number, width, PAGE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counts = row < tl.load(count)
    page = tl.load(page + row // PAGE, mask=counts, other=number)
    into_page = tl.load(into_page + row // PAGE, mask=counts, other=into_number)
    there = (page < number) & (into_page < into_number)
    there = there[:, None] & (column < width)[None, :]
    source = pages + (page * PAGE + row % PAGE)[:, None] * width + column[None, :]
    target = into + (into_page * PAGE + row % PAGE)[:, None] * width + column[None, :]
    tl.store(target, tl.load(source, mask=there, other=0.0), mask=there)


def pages_to_pages(
    rows_SD: Tensor, page_M: Tensor, into_M: Tensor, count_1: Tensor, into_SD: Tensor, page: int
) -> None:
    """Copy the first rows, as many as count, from their pages into pages of ``into_SD``.

    One of both may lie in pinned memory of the host.
    """
    rows, width = page_M.shape[0] * page, rows_SD.shape[1]
    if rows * width == 0:
        return
    grid, block = row_blocks(rows, width)
    numbers = [one.shape[0] // page - 1 for one in (rows_SD, into_SD)]
    _copy[grid](rows_SD, into_SD, page_M, into_M, count_1, *numbers, width, page, *block)


def rows_to_pages(
    x_RD: Tensor, page_M: Tensor, count_1: Tensor, rows_SD: Tensor, page: int
) -> None:
    """Copy the first rows, as many as count, into their pages of ``rows_SD``."""
    _launch(x_RD.contiguous(), page_M, count_1, rows_SD, page, True)


def rows_from_pages(
    rows_SD: Tensor, page_M: Tensor, count_1: Tensor, room: int, page: int
) -> Tensor:
    """Return ``room`` rows, the first of which are those in the pages; the rest is unspecified."""
    x_RD = _room(rows_SD, page_M, count_1, room, page)
    _launch(x_RD, page_M, count_1, rows_SD, page, False)
    return x_RD


def _launch(
    x_RD: Tensor, page_M: Tensor, count_1: Tensor, rows_SD: Tensor, page: int, put: bool
) -> None:
    (rows, width), number = x_RD.shape, rows_SD.shape[0] // page - 1
    grid, block = row_blocks(rows, width)
    if x_RD.numel():
        _move[grid](x_RD, rows_SD, page_M, count_1, number, width, page, put, *block)


def _room(rows_SD: Tensor, page_M: Tensor, count_1: Tensor, room: int, page: int) -> Tensor:
    return rows_SD.new_empty(room, rows_SD.shape[1])


copy = Op(pages_to_pages, lambda *given: None, changes=("into_SD",))
put = Op(rows_to_pages, lambda *given: None, changes=("rows_SD",))
take = Op(rows_from_pages, _room)
