"""Grouped products as Triton kernels, for devices where ``grouped_mm`` synchronises or is wrong.

Where Triton kernels run, they always compute weight gradients of 16-bit rows, as ``grouped_mm``
rounds them. Shapes are those of :mod:`moefold.kernels.grouped.loop`; offsets stay on the device.
Sums are fp32, also for fp32 factors (no tf32). Weight gradients are fp32 and are added in fp32
without prior rounding. Rows past the last offset are neither read nor written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moefold.kernels import fused as kernels
from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

Shape = Sequence[int]


class ProductTile(NamedTuple):
    """Tile computed by one program, with its launch options."""

    rows: int
    columns: int
    depth: int
    """Length of the inner dim in one iteration of the loop."""
    warps: int
    stages: int
    """Iterations whose factors are loaded ahead (``num_stages``)."""

    @property
    def options(self) -> dict[str, int]:
        """Compile options of Triton."""
        return {"num_warps": self.warps, "num_stages": self.stages}


TILES = {2: ProductTile(128, 128, 64, 8, 3), 4: ProductTile(64, 64, 32, 4, 2)}
"""Tiles by bytes per element of a factor; they fit registers and shared memory of every device."""
HOPPER_GRADIENT = ProductTile(128, 128, 32, 4, 5)
"""Tile of 16-bit weight gradients on Hopper, where two such programs share a multiprocessor: 1.25
to 1.4 times as fast as ``TILES`` (H100; 16 to 128 matrices). Elsewhere it spills registers."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WAVE_ROW_TILES = 8
"""Row tiles that use a weight's column tiles concurrently, so that the cache serves all of them."""


@jit
def _tile_rows(offs, number, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return group, first row and end row of a row tile; an empty range past the last tile."""
    g = tl.arange(0, GROUPS)
    end = tl.load(offs + g, mask=g < groups, other=0)
    start = tl.load(offs + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, (end - start + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    group = tl.sum(((last <= number) & (g < groups)).to(tl.int32), 0)
    selected = g == group
    first = tl.sum(tl.where(selected, start + (number - last + tiles) * ROWS, 0), 0)
    return group, first, tl.sum(tl.where(selected, end, 0), 0)


@jit
def _product(
    x, w, offs, y,
    groups, columns, depth, w_group, w_column, w_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``y[r] = w[group of r] x[r]``; ``w`` has any strides."""
    wave = TOGETHER * tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    number = program // wave * TOGETHER + program % TOGETHER
    group, first, end = _tile_rows(offs, number, groups, ROWS, GROUPS)
    if first >= end:
        return
    r = first.to(tl.int64) + tl.arange(0, ROWS)
    c = (program % wave // TOGETHER).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, DEPTH)
    in_rows = (r < end)[:, None]
    in_columns = (c < columns)[None, :]
    x_ptrs = x + r[:, None] * depth + d[None, :]
    w_ptrs = w + group.to(tl.int64) * w_group + c[None, :] * w_column + d[:, None] * w_depth
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, depth, DEPTH):
        in_depth = d < depth - done
        x_rd = tl.load(x_ptrs, mask=in_rows & in_depth[None, :], other=0.0)
        w_dc = tl.load(w_ptrs, mask=in_columns & in_depth[:, None], other=0.0)
        total = tl.dot(x_rd, w_dc, total, input_precision="ieee")
        x_ptrs += DEPTH
        w_ptrs += DEPTH * w_depth
    y_ptrs = y + r[:, None] * columns + c[None, :]
    tl.store(y_ptrs, total.to(y.dtype.element_ty), mask=in_rows & in_columns)


@jit
def _weight_gradient(
    dy, x, offs, dw,
    out, width, dw_group, dw_out, dw_in,
    ADD: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``dw[g] = dy[rows of g]^T x[rows of g]``, added to ``dw`` if ``ADD``."""
    group = tl.program_id(2)
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    end = tl.load(offs + group)
    # Two conditions, as Triton cannot combine a constant and a device value by ``and``.
    if ADD:  # noqa: SIM102
        if start == end:
            return
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    i = tl.program_id(1) * IN + tl.arange(0, IN)
    in_o = o < out
    in_i = i < width
    # Offsets inside a matrix have 32 bits, which takes fewer registers throughout the loop.
    matrix = dw + group.to(tl.int64) * dw_group
    inside = in_o[:, None] & in_i[None, :]
    dw_offsets = o[:, None] * dw_out + i[None, :] * dw_in
    # Read first, so that this load overlaps those of the first factors.
    if ADD:
        total = tl.load(matrix + dw_offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((OUT, IN), tl.float32)
    d = tl.arange(0, DEPTH)
    r = start.to(tl.int64) + d
    dy_ptrs = dy + r[None, :] * out + o[:, None]
    x_ptrs = x + r[:, None] * width + i[None, :]
    full_steps = (end - start) // DEPTH
    for _ in range(full_steps):
        dy_or = tl.load(dy_ptrs, mask=in_o[:, None], other=0.0)
        x_ri = tl.load(x_ptrs, mask=in_i[None, :], other=0.0)
        total = tl.dot(dy_or, x_ri, total, input_precision="ieee")
        dy_ptrs += DEPTH * out
        x_ptrs += DEPTH * width
    rest = end - start - full_steps * DEPTH
    if rest > 0:
        in_rest = d < rest
        dy_or = tl.load(dy_ptrs, mask=in_rest[None, :] & in_o[:, None], other=0.0)
        x_ri = tl.load(x_ptrs, mask=in_rest[:, None] & in_i[None, :], other=0.0)
        total = tl.dot(dy_or, x_ri, total, input_precision="ieee")
    tl.store(matrix + dw_offsets, total.to(dw.dtype.element_ty), mask=inside)


def grouped_product(x_RI: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``y_RO`` with ``y[r] = w[group of r] x[r]``; the weights may have any strides."""
    y_RO = _empty_product(x_RI, w_EOI, offs_E)
    (rows, depth) = x_RI.shape
    (groups, columns, _) = w_EOI.shape
    tile = TILES[x_RI.dtype.itemsize]
    # Each group ends in at most one partial tile.
    row_tiles = cdiv(cdiv(rows, tile.rows) + groups, WAVE_ROW_TILES) * WAVE_ROW_TILES
    if rows:
        programs = row_tiles * cdiv(columns, tile.columns)
        _product[(programs,)](
            x_RI.contiguous(), w_EOI, offs_E, y_RO, groups, columns, depth, *w_EOI.stride(),
            *tile[:3], next_power_of_2(groups), WAVE_ROW_TILES, **tile.options,
        )  # fmt: skip
    return y_RO


def grouped_gradient_(into_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor) -> None:
    """Add ``dy^T x`` of each group's rows to its matrix; empty groups are left unchanged."""
    _launch_gradient(into_EOI, dy_RO, x_RI, offs_E, True)


def grouped_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor) -> Tensor:
    """Return fp32 ``dw_EOI``: ``dy^T x`` of each group's rows, zero for empty groups."""
    dw_EOI = _empty_gradient(dy_RO, x_RI, offs_E)
    _launch_gradient(dw_EOI, dy_RO, x_RI, offs_E, False)
    return dw_EOI


def _launch_gradient(
    dw_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor, add: bool
) -> None:
    groups, out, width = dw_EOI.shape
    size = x_RI.dtype.itemsize
    tile = HOPPER_GRADIENT if size == 2 and kernels.compute_capability_major() == 9 else TILES[size]
    grid = (cdiv(out, tile.rows), cdiv(width, tile.columns), groups)
    _weight_gradient[grid](
        dy_RO.contiguous(), x_RI.contiguous(), offs_E, dw_EOI, out, width, *dw_EOI.stride(),
        add, *tile[:3], **tile.options,
    )  # fmt: skip


def _empty_product(x_RI: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])


def _empty_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor) -> Tensor:
    shape = (offs_E.shape[0], dy_RO.shape[1], x_RI.shape[1])
    return dy_RO.new_empty(shape, dtype=torch.float32)


product = Op(grouped_product, _empty_product)
gradient = Op(grouped_gradient, _empty_gradient)
gradient_ = Op(grouped_gradient_, mutates_args=("into_EOI",))


@register_flop_formula(torch.ops.moefold.grouped_product)
def _product_flops(x_RI: Shape, w_EOI: Shape, *_: Any, **__: Any) -> int:
    """Count all rows, also those past the last offset, as offsets are on the device."""
    return 2 * x_RI[0] * x_RI[1] * w_EOI[1]


@register_flop_formula(torch.ops.moefold.grouped_gradient)
def _gradient_flops(dy_RO: Shape, x_RI: Shape, *_: Any, **__: Any) -> int:
    return 2 * dy_RO[0] * dy_RO[1] * x_RI[1]


@register_flop_formula(torch.ops.moefold.grouped_gradient_)
def _added_gradient_flops(into_EOI: Shape, dy_RO: Shape, x_RI: Shape, *_: Any, **__: Any) -> int:
    return _gradient_flops(dy_RO, x_RI)


def input_gradient(dy_RO: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``dx_RI`` with ``dx[r] = w[group of r]^T dy[r]``."""
    return product(dy_RO, w_EOI.transpose(1, 2), offs_E)


def weight_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor, into_EOI: Tensor | None) -> Tensor:
    """Return ``dw_EOI``, zero for empty groups, added to ``into_EOI`` in place if given."""
    if into_EOI is None:
        return gradient(dy_RO, x_RI, offs_E)
    gradient_(into_EOI, dy_RO, x_RI, offs_E)
    return into_EOI
