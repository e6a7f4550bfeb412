"""RMSNorm (arXiv 1910.07467) over the last dim; saves its input and one number per row.

N rows (all leading dims), D width. Statistics are fp32 (or fp64). Padding rows come last and are
excluded from the weight's gradient. With r = 1 / rms(x) and g = dy * w:

    y = x * r * w      dw = sum over rows of r * (dy * x)
    dx = r * g - x * r^3 * mean(g * x)

On a GPU forward and backward are one kernel each, also fused with a preceding sum or a following
rotation of heads. On a CPU, where memory traffic limits this operation, rows are processed in
chunks that stay in cache.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.gradients import AUTOGRAD_SINK, GradientSink, precomputed
from moefold.kernels.norm import fused as kernels
from moefold.kernels.norm import rotated
from moefold.kernels.operand import Operand
from moefold.kernels.rows import row_chunks, upcast_dtype


def rms_norm(
    x: Tensor,
    weight: Operand,
    epsilon: float,
    *,
    n_valid: int | None = None,
    sink: GradientSink = AUTOGRAD_SINK,
) -> Tensor:
    """Return ``x / rms(x) * weight`` in the dtype of ``x`` ([T, ..., D]).

    Args:
        x: rows.
        weight: operand [D], the scale, fp32 or fp64.
        epsilon: added to the mean square.
        n_valid: number of leading rows of T in the weight's gradient; None is all.
        sink: takes the weight's gradient.
    """
    args = (weight.master, weight.value, epsilon, n_valid, sink)
    return _FusedRmsNorm.apply(x, None, *args)[0] if uses_triton(x) else _RmsNorm.apply(x, *args)


def add_and_norm(
    x: Tensor,
    residual: Tensor,
    weight: Operand,
    epsilon: float,
    *,
    n_valid: int | None = None,
    sink: GradientSink = AUTOGRAD_SINK,
) -> tuple[Tensor, Tensor]:
    """Return ``x + residual`` and its RMSNorm from one kernel; for others see ``rms_norm``."""
    args = (weight.master, weight.value, epsilon, n_valid, sink)
    normed, total = _FusedRmsNorm.apply(x, residual, *args)
    return total, normed


def norm_and_rotate(
    x_THd: Tensor,
    weight: Operand,
    epsilon: float,
    cos_Tp: Tensor,
    sin_Tp: Tensor,
    layout: str,
    n_valid: int | None,
    sink: GradientSink,
) -> Tensor:
    """Return the rotated RMSNorm of each head from one kernel; arguments as of ``rms_norm`` and
    ``rotate``."""
    return _NormAndRotate.apply(
        x_THd, weight.master, weight.value, epsilon, cos_Tp, sin_Tp, layout, n_valid, sink
    )


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight_D: Tensor,
        epsilon: float,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        x_ND = x.flatten(0, -2)
        y_ND = torch.empty(x_ND.shape, dtype=x.dtype, device=x.device)
        rstd_N1 = torch.empty(x_ND.shape[0], 1, dtype=upcast_dtype(x), device=x.device)
        scale_D = weight_D.to(rstd_N1.dtype)
        for rows in row_chunks(x_ND):
            x_nD = x_ND[rows].to(rstd_N1.dtype)
            square_n1 = torch.linalg.vecdot(x_nD, x_nD)[:, None]
            rstd_N1[rows] = square_n1.mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
            torch.mul(x_nD, rstd_N1[rows], out=y_ND[rows]).mul_(scale_D)
        ctx.save_for_backward(x, rstd_N1, weight_D)
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd_N1, weight_D = ctx.saved_tensors
        x_ND = x.flatten(0, -2)
        dy_ND = dy.flatten(0, -2)
        wide = rstd_N1.dtype
        dx_ND = torch.empty(x_ND.shape, dtype=x.dtype, device=x.device)
        scale_D = weight_D.to(wide)
        dw_D = torch.zeros_like(weight_D, dtype=wide)
        valid_rows = x_ND.shape[0]
        if ctx.n_valid is not None:
            valid_rows = ctx.n_valid * x.shape[1:-1].numel()
        for rows in row_chunks(x_ND):
            x_nD = x_ND[rows].to(wide)
            dy_nD = dy_ND[rows].to(wide)
            rstd_n1 = rstd_N1[rows]
            # Both sums use this product: over a row for dx, over a column for dw.
            product_nD = dy_nD * x_nD
            mean_n1 = torch.mv(product_nD, scale_D)[:, None].mul_(-1 / x.shape[-1])
            into = dx_ND[rows] if x.dtype == wide else None
            dx_nD = torch.mul(dy_nD, scale_D, out=into)
            dx_nD.addcmul_(x_nD, mean_n1.mul_(rstd_n1).mul_(rstd_n1)).mul_(rstd_n1)
            if into is None:
                dx_ND[rows] = dx_nD
            if ctx.needs_input_grad[1]:
                valid = max(0, valid_rows - rows.start)
                dw_D.addmv_(product_nD[:valid].t(), rstd_n1[:valid, 0])
        dw = ctx.sink.deliver(ctx.master, precomputed(dw_D)) if ctx.needs_input_grad[1] else None
        return dx_ND.view(x.shape), dw, None, None, None, None


class _FusedRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        master: Tensor,
        weight_D: Tensor,
        epsilon: float,
        n_valid: int | None,
        sink: GradientSink,
    ) -> tuple[Tensor, Tensor]:
        residual_ND = None if residual is None else residual.flatten(0, -2)
        y_ND, rstd_N, sum_ND = kernels.forward(x.flatten(0, -2), weight_D, epsilon, residual_ND)
        total = x if residual is None else sum_ND.view(x.shape)
        ctx.save_for_backward(total, rstd_N, weight_D)
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        ctx.summed = residual is not None
        return y_ND.view(x.shape), total if ctx.summed else sum_ND

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd_N, weight_D = ctx.saved_tensors
        valid_rows = total.shape[0] if ctx.n_valid is None else ctx.n_valid
        valid_rows *= total.shape[1:-1].numel()
        dx_ND, partials_PD = kernels.backward(
            dy.flatten(0, -2), total.flatten(0, -2), weight_D, rstd_N, valid_rows,
            dtotal.flatten(0, -2) if ctx.summed else None,
        )  # fmt: skip
        dx = dx_ND.view(total.shape)
        dw = _deliver_partials(ctx, partials_PD) if ctx.needs_input_grad[2] else None
        return dx, dx if ctx.summed else None, dw, None, None, None, None


class _NormAndRotate(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_THd: Tensor,
        master: Tensor,
        weight_d: Tensor,
        epsilon: float,
        cos_Tp: Tensor,
        sin_Tp: Tensor,
        layout: str,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        ctx.interleaved = layout == "interleaved"
        inputs = (x_THd, weight_d, cos_Tp, sin_Tp)
        y_THd, rstd_TH = rotated.forward(*inputs, epsilon, ctx.interleaved)
        ctx.save_for_backward(*inputs, rstd_TH)
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        return y_THd

    @staticmethod
    def backward(ctx: Any, dy_THd: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        valid = dy_THd.shape[0] if ctx.n_valid is None else ctx.n_valid
        dx_THd, partials_Pd = rotated.backward(dy_THd, *saved, valid, ctx.interleaved)
        dw_d = _deliver_partials(ctx, partials_Pd) if ctx.needs_input_grad[1] else None
        return dx_THd, dw_d, *(None,) * 7


def _deliver_partials(ctx: Any, partials_PD: Tensor) -> Tensor | None:
    """Pass the sum of partial weight gradients [P, D] to the sink of a function's context."""

    def product(into_D: Tensor | None) -> Tensor:
        dw_D = partials_PD.new_zeros(partials_PD.shape[1]) if into_D is None else into_D
        kernels.sum_partials(partials_PD, dw_D)
        return dw_D

    return ctx.sink.deliver(ctx.master, product)
