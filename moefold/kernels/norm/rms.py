"""RMSNorm (arXiv 1910.07467) over the last dim; keeps its input and one number per row.

T rows (any leading dims), D width. The statistics are fp32 (or fp64). Padding rows come
last and are cut off before the weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.kernels.gradients import RETURNED, GradientSink


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    epsilon: float,
    *,
    n_valid: int | None = None,
    sink: GradientSink = RETURNED,
) -> Tensor:
    """Return ``x / rms(x) * weight`` in the dtype of ``x`` ([..., D], first dim T)."""
    return _RmsNorm.apply(x, weight_D, epsilon, n_valid, sink)  # type: ignore[no-any-return]


def reference(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """The same by autograd, in fp64."""
    wide = x.double()
    return (
        wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight_D.double()
    ).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        epsilon: float,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        wide = _wide(x)
        y, rstd = torch.ops.aten._fused_rms_norm(
            wide, [x.shape[-1]], weight_D.to(wide.dtype), epsilon
        )
        ctx.save_for_backward(x, rstd, weight_D)
        # The parameter itself: what saved tensors give back may be another tensor of equal value.
        ctx.master, ctx.n_valid, ctx.sink = weight_D, n_valid, sink
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, rstd, weight_D = ctx.saved_tensors
        wide, dy = _wide(x), _wide(dy)
        normed = wide * rstd
        dw = None
        if ctx.needs_input_grad[1]:
            kept = dy[: ctx.n_valid] * normed[: ctx.n_valid]

            def product(into: Tensor | None) -> Tensor:
                dw_D = kept.flatten(0, -2).sum(0)
                return dw_D if into is None else into.add_(dw_D)

            dw = ctx.sink.deliver(ctx.master, product)
        dn = dy.mul(weight_D)
        dx = torch.addcmul(dn, normed, (dn * normed).mean(-1, keepdim=True), value=-1).mul_(rstd)
        return dx.to(x.dtype), dw, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
