"""Gated feed-forward with products of low-precision codes. N rows, D hidden, F width."""

from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import GradientSink
from moefold.kernels.quantise.blocks import Format, Quantised, encode
from moefold.kernels.rows import row_chunks
from moefold.kernels.scaled.products import QuantisedOperand, concatenate, scaled_product
from moefold.kernels.scaled.rows import RowRuns
from moefold.kernels.swiglu import activation


def scaled_ffn(
    x_ND: Tensor,
    w_in: QuantisedOperand,
    w_out: QuantisedOperand,
    rows: RowRuns,
    sink: GradientSink,
    p_N: Tensor | None = None,
    hidden: Format | None = None,
) -> Tensor:
    """Return ``w_out (p * silu(w_gate x) * w_up x)`` of shape [N, D].

    Saves codes of both products' input rows, in blocks along rows, and the pre-activation.

    Args:
        x_ND: rows.
        w_in: [(E,) 2 F, D], gate then up.
        w_out: [(E,) D, F].
        rows: valid rows, as in :func:`moefold.kernels.scaled.products.scaled_product`.
        sink: takes the weights' gradients.
        p_N: routing weight of each row, or None.
        hidden: format of the saved pre-activation, with separate blocks of gate and up; None saves
            it unchanged.
    """
    h_N2F = scaled_product(x_ND, w_in, rows, sink)
    a_NF = _Activation.apply(h_N2F, p_N, hidden if torch.is_grad_enabled() else None)
    return scaled_product(a_NF, w_out, rows, sink)


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, h_N2F: Tensor, p_N: Tensor | None, hidden: Format | None) -> Tensor:
        saved: tuple[Tensor, ...] = (h_N2F,)
        if hidden is not None:
            cuts = row_chunks(h_N2F) or [slice(0)]
            chunks = [h_N2F[cut].unflatten(1, (2, -1)) for cut in cuts]
            quantised = concatenate([encode(chunk, hidden) for chunk in chunks])
            saved = quantised.codes, quantised.scales
        ctx.save_for_backward(p_N, *saved)
        ctx.hidden = hidden
        return activation.forward(h_N2F, p_N)

    @staticmethod
    def backward(ctx: Any, da_NF: Tensor) -> tuple[Tensor | None, ...]:
        p_N, h_N2F, *scales = ctx.saved_tensors
        da_NF = da_NF.contiguous()
        if not scales:
            dh_N2F, dp_N, _ = activation.backward(h_N2F, p_N, da_NF)
            return dh_N2F, dp_N, None
        codes_N2F = h_N2F
        (scales_N2B,) = scales
        dh_N2F = da_NF.new_empty(len(da_NF), 2 * da_NF.shape[1])
        dp_N = None if p_N is None else torch.empty_like(p_N)
        for cut in row_chunks(dh_N2F):
            codes = codes_N2F[cut]
            quantised = Quantised(codes, scales_N2B[cut], None, ctx.hidden, -1, codes.shape)
            args = quantised.dequantise(da_NF.dtype).flatten(1), None if p_N is None else p_N[cut]
            dh_N2F[cut], dp, _ = activation.backward(*args, da_NF[cut])
            if dp_N is not None and dp is not None:
                dp_N[cut] = dp
        return dh_N2F, dp_N, None
