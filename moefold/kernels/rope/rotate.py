"""Rotary position embedding of query and key rows (arXiv 2104.09864).

T rows, H heads, d dims of a head. Angles are given as ``cos_Tp`` and ``sin_Tp``, for the last 2 p
dims. On a GPU forward and backward are one kernel each.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.rope import fused as kernels


def rotate(x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, layout: str) -> Tensor:
    """Rotate each pair of the last 2 p dims by its angle; the dims before are unchanged.

    Layout ``half`` pairs dim i of these with i + p; ``interleaved`` pairs 2i with 2i + 1.
    """
    nope_dim = x_THd.shape[-1] - 2 * cos_Tp.shape[1]
    if nope_dim == 0 or uses_triton(x_THd):
        return _Rotate.apply(x_THd, cos_Tp, sin_Tp, layout)
    nope, rope = x_THd.split((nope_dim, 2 * cos_Tp.shape[1]), 2)
    return torch.cat([nope, _Rotate.apply(rope, cos_Tp, sin_Tp, layout)], 2)


def expand(
    kv_THx: Tensor, rope_Tr: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, nope_dim: int, layout: str
) -> tuple[Tensor, Tensor]:
    """Return the keys [T, H, nope_dim + 2 p] and values [T, H, v] of MLA.

    Args:
        kv_THx: up-projected latents: ``nope_dim`` dims of each head's key, then its value.
        rope_Tr: position part of the key, common to all heads; it is rotated here.
        cos_Tp: cosines of each row's angles.
        sin_Tp: sines of each row's angles.
        nope_dim: number of a key's dims that are not rotated.
        layout: pairing of dims, as in :func:`rotate`.
    """
    if uses_triton(kv_THx):
        return _Expand.apply(kv_THx, rope_Tr, cos_Tp, sin_Tp, nope_dim, layout)
    k_THn, v_THv = kv_THx.split((nope_dim, kv_THx.shape[2] - nope_dim), 2)
    rope_T1r = rotate(rope_Tr[:, None], cos_Tp, sin_Tp, layout)
    k_THd = torch.cat([k_THn, rope_T1r.expand(-1, kv_THx.shape[1], -1)], 2)
    return k_THd, v_THv.contiguous()


class _Expand(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv_THx: Tensor,
        rope_Tr: Tensor,
        cos_Tp: Tensor,
        sin_Tp: Tensor,
        nope_dim: int,
        layout: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_Tp, sin_Tp)
        ctx.args = nope_dim, layout == "interleaved"
        return kernels.expand(kv_THx, rope_Tr, cos_Tp, sin_Tp, *ctx.args)

    @staticmethod
    def backward(ctx: Any, dk_THd: Tensor, dv_THv: Tensor) -> tuple[Tensor | None, ...]:
        gradients = kernels.expand_backward(dk_THd, dv_THv, *ctx.saved_tensors, *ctx.args)
        return *gradients, None, None, None, None


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, layout: str, triton: bool, inverse: bool = False
) -> Tensor:
    if triton:
        return kernels.rotate(x, cos, sin, layout == "interleaved", inverse)
    sin = -sin if inverse else sin
    if layout == "half":
        # On full heads: passes over short halves take longer than one roll.
        cos_pairs = torch.cat([cos, cos], 1)[:, None]
        sin_pairs = torch.cat([-sin, sin], 1)[:, None]
        return (x * cos_pairs).addcmul_(x.roll(cos.shape[1], -1), sin_pairs)
    cos = cos[:, None]
    sin = sin[:, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a = x[..., 0::2]
    b = x[..., 1::2]
    out_a = out[..., 0::2]
    out_b = out[..., 1::2]
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos_Tp, sin_Tp)
        ctx.args = layout, uses_triton(x_THd)
        return _rotate(x_THd, cos_Tp, sin_Tp, *ctx.args)

    @staticmethod
    def backward(ctx: Any, dy_THd: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(dy_THd, *ctx.saved_tensors, *ctx.args, inverse=True), None, None, None
