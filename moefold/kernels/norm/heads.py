"""Heads normed, then turned by their rows' positions, with one kernel each way on a GPU."""

from typing import Any

from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import GradientSink
from moefold.kernels.norm import turned as kernels
from moefold.kernels.norm.rms import sum_of_shares
from moefold.kernels.operand import Operand


def norm_and_turn(
    x_THd: Tensor,
    weight: Operand,
    epsilon: float,
    cos_Tp: Tensor,
    sin_Tp: Tensor,
    layout: str,
    n_valid: int | None,
    sink: GradientSink,
) -> Tensor:
    """Return each head's RMSNorm, rotated; arguments as ``rms_norm`` and ``rotate`` take them."""
    return _NormAndTurn.apply(
        x_THd, weight.master, weight.value, epsilon, cos_Tp, sin_Tp, layout, n_valid, sink
    )


class _NormAndTurn(Function):
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
        given = (x_THd, weight_d, cos_Tp, sin_Tp)
        y_THd, rstd_TH = kernels.forward(*given, epsilon, ctx.interleaved)
        ctx.save_for_backward(*given, rstd_TH)
        ctx.master, ctx.n_valid, ctx.sink = master, n_valid, sink
        return y_THd

    @staticmethod
    def backward(ctx: Any, dy_THd: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        valid = dy_THd.shape[0] if ctx.n_valid is None else ctx.n_valid
        dx_THd, share_Pd = kernels.backward(dy_THd, *saved, valid, ctx.interleaved)
        dw_d = sum_of_shares(ctx, share_Pd) if ctx.needs_input_grad[1] else None
        return dx_THd, dw_d, *(None,) * 7
