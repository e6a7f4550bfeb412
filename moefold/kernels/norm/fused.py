"""RMSNorm as Triton kernels for forward and backward, optionally fused with a preceding sum.

N rows, D width, P programs of backward. Arithmetic is fp32. A program processes whole rows. In
backward it processes every P-th tile of rows and accumulates a partial weight gradient, so that
rows are read once; the partial gradients are summed in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.fused import Op, cdiv, contiguous_in_rows, jit, next_power_of_2, tl

TILE = 2048
"""Elements of a tile; more if a row is longer."""
MAX_PROGRAMS = 512
"""Largest number of programs of backward, each with at least 16 rows: few partial gradients."""


@jit
def _forward(
    x, other, weight, total, y, rstd,
    rows, width, x_stride, epsilon,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    if ADD:
        value += tl.load(other + offsets, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + offsets, stored, mask=inside)
        # Backward reads the sum as it is stored, rounded.
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + epsilon)
    tl.store(rstd + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + offsets, (value * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    dy, x, other, weight, rstd, dx, partials,
    rows, valid, width, x_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    partial = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = value.to(tl.float32) * scale
        # Invalid rows may contain anything, including NaN.
        partial += tl.sum(tl.where((row < valid)[:, None], grad * normed, 0.0), 0)
        grad *= w[None, :]
        mean = tl.sum(grad * normed, 1, keep_dims=True) / width
        out = (grad - normed * mean) * scale
        if ADD:
            out += tl.load(other + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, out.to(dx.dtype.element_ty), mask=inside)
    offset = program.to(tl.int64) * width + column
    tl.store(partials + offset, partial, mask=column < width)


@jit
def _sum_partials(
    partials, into,
    count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        partial_ptrs = partials + row[:, None] * width + column[None, :]
        total += tl.sum(tl.load(partial_ptrs, mask=inside, other=0.0), 0)
    before = tl.load(into + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(into + column, (before + total).to(into.dtype.element_ty), mask=column < width)


def norm_forward(
    x_ND: Tensor, weight_D: Tensor, epsilon: float, other_ND: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the RMSNorm of ``x_ND + other_ND``, fp32 1 / rms of each row, and the sum.

    The sum has no elements if ``other_ND`` is None.
    """
    y_ND, rstd_N, sum_ND = _empty_outputs(x_ND, weight_D, epsilon, other_ND)
    (rows, width) = x_ND.shape
    x_ND = contiguous_in_rows(x_ND)
    other_ND = None if other_ND is None else other_ND.contiguous()
    tile, columns, warps = _tile(width)
    if y_ND.numel():
        programs = cdiv(rows, tile)
        _forward[(programs,)](
            x_ND, other_ND, weight_D, sum_ND, y_ND, rstd_N, rows, width, x_ND.stride(0), epsilon,
            other_ND is not None, tile, columns, num_warps=warps,
        )  # fmt: skip
    return y_ND, rstd_N, sum_ND


def norm_backward(
    dy_ND: Tensor,
    x_ND: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    n_valid: int,
    other_ND: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``dx_ND``, to which ``other_ND`` is added, and partial weight gradients [P, D].

    Their sum is the weight's gradient over the first ``n_valid`` rows.
    """
    dx_ND, partials_PD = _empty_gradients(dy_ND, x_ND)
    (rows, width) = x_ND.shape
    x_ND = contiguous_in_rows(x_ND)
    other_ND = None if other_ND is None else other_ND.contiguous()
    tile, columns, warps = _tile(width)
    if dx_ND.numel():
        _backward[(partials_PD.shape[0],)](
            dy_ND.contiguous(), x_ND, other_ND, weight_D, rstd_N, dx_ND, partials_PD, rows, n_valid,
            width, x_ND.stride(0), other_ND is not None, tile, columns, num_warps=warps,
        )  # fmt: skip
    return dx_ND, partials_PD


def add_partials(partials_PD: Tensor, into_D: Tensor) -> None:
    """Add the sum of partial weight gradients to ``into_D``."""
    width = into_D.shape[0]
    _sum_partials[(cdiv(width, 32),)](partials_PD, into_D, partials_PD.shape[0], width, 64, 32)


def _tile(width: int) -> tuple[int, int, int]:
    """Return a tile's rows, columns and warps."""
    columns = next_power_of_2(width)
    return max(1, TILE // columns), columns, min(16, max(4, columns // 256))


def _empty_outputs(
    x_ND: Tensor, weight_D: Tensor, epsilon: float, other_ND: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rstd_N = x_ND.new_empty(x_ND.shape[:1], dtype=torch.float32)
    sum_ND = x_ND.new_empty(0 if other_ND is None else x_ND.shape)
    return x_ND.new_empty(x_ND.shape), rstd_N, sum_ND


def _empty_gradients(dy_ND: Tensor, x_ND: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, width = x_ND.shape
    partials = min(MAX_PROGRAMS, cdiv(rows, max(16, _tile(width)[0])))
    return x_ND.new_empty(x_ND.shape), x_ND.new_empty(partials, width, dtype=torch.float32)


forward = Op(norm_forward, _empty_outputs)
backward = Op(norm_backward, _empty_gradients)
sum_partials = Op(add_partials, mutates_args=("into_D",))
