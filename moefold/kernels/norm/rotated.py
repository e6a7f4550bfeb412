"""RMSNorm of each head followed by rotary embedding, as Triton kernels for forward and backward.

T rows, H heads, d dims of a head in p = d / 2 pairs, P programs of backward. Arithmetic is fp32.
With r = 1 / rms(x), a head is normed, ``n = x * r * w``, then each pair of dims is rotated:

    y_a = n_a * cos - n_b * sin      y_b = n_b * cos + n_a * sin

A forward program processes a row, whose heads share its angles, a backward program every P-th row.
Partial weight gradients are those of ``norm/fused.py``.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.fused import Op, jit, next_power_of_2, tl
from moefold.kernels.norm.fused import MAX_PROGRAMS

TILE = 1024
"""Pairs of a tile."""


@jit
def _forward(
    x, weight, cos, sin, y, rstd,
    heads, pairs, epsilon,
    STRIDE: tl.constexpr, DISTANCE, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    mask = pair < pairs
    dim = pair * STRIDE
    w_a = tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)[None, :]
    w_b = tl.load(weight + dim + DISTANCE, mask=mask, other=0.0).to(tl.float32)[None, :]
    c = tl.load(cos + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    for block in range(0, heads, HEADS):
        head = block + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & mask[None, :]
        index = row * heads + head
        first = index[:, None] * (2 * pairs) + dim[None, :]
        a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + first + DISTANCE, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * pairs) + epsilon)
        tl.store(rstd + index, scale, mask=head < heads)
        a *= scale[:, None] * w_a
        b *= scale[:, None] * w_b
        tl.store(y + first, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
        tl.store(y + first + DISTANCE, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    dy, x, weight, cos, sin, rstd, dx, partials,
    rows, valid, heads, pairs,
    STRIDE: tl.constexpr, DISTANCE, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    mask = pair < pairs
    dim = pair * STRIDE
    w_a = tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)[None, :]
    w_b = tl.load(weight + dim + DISTANCE, mask=mask, other=0.0).to(tl.float32)[None, :]
    partial_a = tl.zeros((PAIRS,), tl.float32)
    partial_b = tl.zeros((PAIRS,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        # Numbers of heads fit in 32 bits, offsets of elements do not.
        c = tl.load(cos + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
        for block in range(0, heads, HEADS):
            head = block + tl.arange(0, HEADS)
            inside = (head < heads)[:, None] & mask[None, :]
            index = (row * heads + head).to(tl.int64)
            first = index[:, None] * (2 * pairs) + dim[None, :]
            dy_a = tl.load(dy + first, mask=inside, other=0.0).to(tl.float32)
            dy_b = tl.load(dy + first + DISTANCE, mask=inside, other=0.0).to(tl.float32)
            grad_a = dy_a * c + dy_b * s
            grad_b = dy_b * c - dy_a * s
            scale = tl.load(rstd + index, mask=head < heads, other=0.0)[:, None]
            a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32) * scale
            b = tl.load(x + first + DISTANCE, mask=inside, other=0.0).to(tl.float32) * scale
            # Invalid rows may contain anything, including NaN.
            partial_a += tl.where(row < valid, tl.sum(grad_a * a, 0), 0.0)
            partial_b += tl.where(row < valid, tl.sum(grad_b * b, 0), 0.0)
            grad_a *= w_a
            grad_b *= w_b
            mean = tl.sum(grad_a * a + grad_b * b, 1, keep_dims=True) / (2 * pairs)
            out_a = (grad_a - a * mean) * scale
            out_b = (grad_b - b * mean) * scale
            tl.store(dx + first, out_a.to(dx.dtype.element_ty), mask=inside)
            tl.store(dx + first + DISTANCE, out_b.to(dx.dtype.element_ty), mask=inside)
    partial_ptrs = partials + program.to(tl.int64) * (2 * pairs) + dim
    tl.store(partial_ptrs, partial_a, mask=mask)
    tl.store(partial_ptrs + DISTANCE, partial_b, mask=mask)


def norm_rotate_forward(
    x_THd: Tensor,
    weight_d: Tensor,
    cos_Tp: Tensor,
    sin_Tp: Tensor,
    epsilon: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return the normed and rotated heads, and 1 / rms of each head, fp32 [T, H].

    A pair is dims i and i + d/2, or 2i and 2i + 1 if ``interleaved``.
    """
    y_THd, rstd_TH = _empty_outputs(x_THd)
    (tokens, heads) = rstd_TH.shape
    pairs = cos_Tp.shape[1]
    if y_THd.numel():
        _forward[(tokens,)](
            x_THd.contiguous(), weight_d, cos_Tp, sin_Tp, y_THd, rstd_TH, heads, pairs, epsilon,
            1 + interleaved, 1 if interleaved else pairs, *_tile(heads, pairs),
        )  # fmt: skip
    return y_THd, rstd_TH


def norm_rotate_backward(
    dy_THd: Tensor,
    x_THd: Tensor,
    weight_d: Tensor,
    cos_Tp: Tensor,
    sin_Tp: Tensor,
    rstd_TH: Tensor,
    n_valid: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``dx_THd`` and partial weight gradients [P, d].

    Their sum is the weight's gradient over the first ``n_valid`` rows.
    """
    results = _empty_gradients(dy_THd, x_THd)
    (tokens, heads) = rstd_TH.shape
    pairs = cos_Tp.shape[1]
    if rstd_TH.numel():
        _backward[(results[1].shape[0],)](
            dy_THd.contiguous(), x_THd.contiguous(), weight_d, cos_Tp, sin_Tp, rstd_TH, *results,
            tokens, n_valid, heads, pairs, 1 + interleaved, 1 if interleaved else pairs,
            *_tile(heads, pairs),
        )  # fmt: skip
    return results


def _tile(heads: int, pairs: int) -> tuple[int, int]:
    block = next_power_of_2(pairs)
    return min(next_power_of_2(heads), max(1, TILE // block)), block


def _empty_outputs(x_THd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_THd.new_empty(x_THd.shape), x_THd.new_empty(x_THd.shape[:2], dtype=torch.float32)


def _empty_gradients(dy_THd: Tensor, x_THd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    partials_Pd = x_THd.new_empty(
        min(MAX_PROGRAMS, len(x_THd)), x_THd.shape[2], dtype=torch.float32
    )
    return x_THd.new_empty(x_THd.shape), partials_Pd


forward = Op(norm_rotate_forward, _empty_outputs)
backward = Op(norm_rotate_backward, _empty_gradients)
