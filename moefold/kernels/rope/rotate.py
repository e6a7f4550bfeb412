"""Rotation of query and key rows by their positions (arXiv 2104.09864).

T rows, H heads, d rotary dims. Angles come as ``cos_Tp`` and ``sin_Tp`` with p = d / 2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, layout: str) -> Tensor:
    """Rotate each pair of dims by its angle.

    ``half`` pairs dim i with i + d/2; ``interleaved`` pairs 2i with 2i + 1.
    """
    return _Rotate.apply(x_THd, cos_Tp, sin_Tp, layout)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if layout == "half":
        (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    else:
        a, b, out_a, out_b = x[..., 0::2], x[..., 1::2], out[..., 0::2], out[..., 1::2]
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos_Tp, sin_Tp)
        ctx.layout = layout
        return _turn(x_THd, cos_Tp, sin_Tp, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_THd: Tensor) -> tuple[Tensor | None, ...]:
        cos_Tp, sin_Tp = ctx.saved_tensors
        return _turn(dy_THd, cos_Tp, -sin_Tp, ctx.layout), None, None, None
