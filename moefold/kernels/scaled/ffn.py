"""A gated feed-forward whose products read codes. N rows, D hidden, F width."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.kernels.gradients import GradientSink
from moefold.kernels.scaled.products import NarrowOperand, scaled_product
from moefold.kernels.scaled.rows import RowRuns
from moefold.kernels.swiglu import pieces


def narrow_ffn(
    x_ND: Tensor,
    w_in: NarrowOperand,
    w_out: NarrowOperand,
    rows: RowRuns,
    sink: GradientSink,
    p_N: Tensor | None = None,
) -> Tensor:
    """Return ``w_out (p * silu(w_gate x) * up x)`` of shape [N, D].

    It keeps codes of both products' rows along the rows, and the wide pre-activation.

    Args:
        x_ND: rows.
        w_in: [(E,) 2 F, D], gate then up.
        w_out: [(E,) D, F].
        rows: as for :func:`moefold.kernels.scaled.products.scaled_product`.
        sink: where the weights' gradients go.
        p_N: weight of each row, or None.
    """
    h_N2F = scaled_product(x_ND, w_in, rows, sink)
    return scaled_product(_Activation.apply(h_N2F, p_N), w_out, rows, sink)  # type: ignore[arg-type]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_N2F: Tensor, p_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(h_N2F, p_N)
        return pieces.forward(h_N2F, p_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_NF: Tensor) -> tuple[Tensor | None, ...]:
        h_N2F, p_N = ctx.saved_tensors
        dh_N2F, dp_N, _ = pieces.backward(h_N2F, p_N, da_NF.contiguous())
        return dh_N2F, dp_N
