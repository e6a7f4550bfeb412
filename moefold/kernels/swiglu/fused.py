"""SwiGLU with an optional weight per row as Triton kernels, one for forward and one for backward.

N rows, F width; ``h_N2F`` holds gate, then up. Arithmetic is fp32. A forward program computes a
tile of rows and columns, a backward program whole rows, as a row weight's gradient sums columns.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

COLUMNS = 256
"""Largest number of columns of a tile: 16 bytes of bf16 per thread of a warp."""


@jit
def _forward(
    h, p, a,
    rows, width,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    gate_ptrs = h + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=inside, other=0.0).to(tl.float32)
    act = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        act *= tl.load(p + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    out_ptrs = a + row[:, None] * width + column[None, :]
    tl.store(out_ptrs, act.to(a.dtype.element_ty), mask=inside)


@jit
def _backward(
    h, p, da, dh, dp, a,
    rows, width,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight_grad = tl.zeros((ROWS,), tl.float32)
    weight = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(p + row, mask=row < rows, other=0.0).to(tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        in_h = row[:, None] * (2 * width) + column[None, :]
        in_a = row[:, None] * width + column[None, :]
        gate = tl.load(h + in_h, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + in_h + width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(da + in_a, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        act = silu * up
        if WEIGHTED:
            weight_grad += tl.sum(act * grad, 1)
            act *= weight[:, None]
            grad *= weight[:, None]
        tl.store(a + in_a, act.to(a.dtype.element_ty), mask=inside)
        tl.store(dh + in_h + width, (silu * grad).to(dh.dtype.element_ty), mask=inside)
        dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dh + in_h, dgate.to(dh.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(dp + row, weight_grad.to(dp.dtype.element_ty), mask=row < rows)


def swiglu_forward(h_N2F: Tensor, p_N: Tensor | None) -> Tensor:
    """Return ``a_NF = p * silu(gate) * up`` in the dtype of ``h_N2F``."""
    rows = h_N2F.shape[0]
    width = h_N2F.shape[1] // 2
    a_NF = h_N2F.new_empty(rows, width)
    columns = min(COLUMNS, next_power_of_2(width))
    tile = max(1, 2048 // columns)
    if a_NF.numel():
        grid = (cdiv(rows, tile), cdiv(width, columns))
        _forward[grid](h_N2F.contiguous(), p_N, a_NF, rows, width, p_N is not None, tile, columns)
    return a_NF


def swiglu_backward(
    h_N2F: Tensor, p_N: Tensor | None, da_NF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dh_N2F``, ``dp_N`` (no elements without ``p_N``) and the recomputed ``a_NF``."""
    rows, width = da_NF.shape
    dh_N2F, dp_N, a_NF = _empty_gradients(h_N2F, p_N, da_NF)
    columns = min(COLUMNS, next_power_of_2(width))
    tile = max(1, 2048 // columns)
    if rows:
        programs = cdiv(rows, tile)
        _backward[(programs,)](
            h_N2F.contiguous(), p_N, da_NF.contiguous(), dh_N2F, dp_N, a_NF, rows, width,
            p_N is not None, tile, columns,
        )  # fmt: skip
    return dh_N2F, dp_N, a_NF


def _empty_gradients(
    h_N2F: Tensor, p_N: Tensor | None, da_NF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dp_N = h_N2F.new_empty(0, dtype=torch.float32) if p_N is None else p_N.new_empty(p_N.shape)
    return h_N2F.new_empty(h_N2F.shape), dp_N, da_NF.new_empty(da_NF.shape)


forward = Op(
    swiglu_forward, lambda h_N2F, p_N: h_N2F.new_empty(h_N2F.shape[0], h_N2F.shape[1] // 2)
)
backward = Op(swiglu_backward, _empty_gradients)
