"""Short causal depthwise convolution in plain torch: between two gates, as in LFM2,

    y_t = c_t * sum over j < K of w[K - 1 - j] * (b * x)_(t - j)

or of ``x`` alone, followed by SiLU, as in delta nets,

    y_t = silu(sum over j < K of w[K - 1 - j] * x_(t - j))

over the rows of a document: a row at position p has p rows before it. T rows, C channels, K taps, P
separate runs of rows, each preceded by J = K - 1 rows, which may be on another rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import AUTOGRAD_SINK, GradientSink, precomputed
from moefold.kernels.operand import Operand
from moefold.kernels.rows import upcast


def short_convolution(
    x_TX: Tensor,
    before_PJC: Tensor | None,
    weight: Operand,
    positions_T: Tensor,
    *,
    gated: bool,
    n_valid: int | None = None,
    sink: GradientSink = AUTOGRAD_SINK,
) -> Tensor:
    """Return ``y_TC`` in the rows' dtype; only the inputs are saved for backward.

    Args:
        x_TX: b, c and x of each row, concatenated, if gated; else x.
        before_PJC: convolution input, ``b * x`` or x, of the rows before each run; None if one run
            has all rows.
        weight: operand [C, 1, K]; the last tap is that of the row itself.
        positions_T: position of each row in its document.
        gated: whether gates are applied rather than SiLU.
        n_valid: number of leading rows in the weight's gradient; None is all.
        sink: takes the weight's gradient.
    """
    args = weight.master, weight.value, positions_T, n_valid, sink, gated
    return _Convolution.apply(x_TX, before_PJC, *args)


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TX: Tensor,
        before_PJC: Tensor | None,
        master: Tensor,
        value_C1K: Tensor,
        positions_T: Tensor,
        n_valid: int | None,
        sink: GradientSink,
        gated: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_TX, before_PJC, value_C1K, positions_T)
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        ctx.gated = gated
        _, c, _, _, z = _convolve(x_TX, before_PJC, value_C1K, positions_T, gated)
        return (F.silu(z) if c is None else c * z).to(x_TX.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TX, before_PJC, value_C1K, positions_T = ctx.saved_tensors
        b, c, x, joined, z = _convolve(x_TX, before_PJC, value_C1K, positions_T, ctx.gated)
        dy = upcast(dy_TC)
        sigmoid = z.sigmoid()
        dz = dy * sigmoid * (1 + z * (1 - sigmoid)) if c is None else dy * c
        taps = value_C1K.shape[-1]
        djoined = torch.zeros_like(joined)
        sums = list[Tensor]()
        for distance, rows in _taps(taps, joined):
            in_document_T1 = (positions_T >= distance)[:, None]
            dtap = dz * value_C1K[:, 0, taps - 1 - distance].to(dz.dtype)
            djoined[:, rows] += dtap.where(in_document_T1, 0).unflatten(0, (len(joined), -1))
            read = joined[:, rows].flatten(0, 1)
            sums.append((dz * read).where(in_document_T1, 0)[: ctx.n_valid].sum(0))
        du = djoined[:, taps - 1 :].flatten(0, 1)
        dbefore = None if before_PJC is None else djoined[:, : taps - 1].to(before_PJC.dtype)
        dw = None
        if ctx.needs_input_grad[2]:  # a sum over rows, computed immediately
            dw_C1K = torch.stack(sums[::-1], 1)[:, None].to(ctx.master.dtype)
            dw = ctx.sink.deliver(ctx.master, precomputed(dw_C1K))
        if b is None:
            dx = du.to(
                x_TX.dtype, copy=True
            )  # a copy, which does not keep the preceding rows alive
        else:
            dx = torch.cat([du * x, dy * z, du * b], 1).to(x_TX.dtype)
        return dx, dbefore, dw, None, None, None, None, None


def _convolve(
    x_TX: Tensor,
    before_PJC: Tensor | None,
    value_C1K: Tensor,
    positions_T: Tensor,
    gated: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
    """Return b, c (None without gates) and x in a wide dtype, the convolution's input with the rows
    before each run, [P, J + T / P, C], and its output [T, C]."""
    b, c, x = upcast(x_TX).chunk(3, 1) if gated else (None, None, upcast(x_TX))
    u_TC = x if b is None else b * x
    taps = value_C1K.shape[-1]
    if before_PJC is None:
        before_PJC = u_TC.new_zeros(1, taps - 1, u_TC.shape[1])
    runs = u_TC.unflatten(0, (len(before_PJC), -1))
    joined = torch.cat([before_PJC.to(u_TC.dtype), runs], 1)
    mixed = None
    for distance, rows in _taps(taps, joined):
        read = joined[:, rows].flatten(0, 1).where((positions_T >= distance)[:, None], 0)
        term = read * value_C1K[:, 0, taps - 1 - distance].to(read.dtype)
        mixed = term if mixed is None else mixed + term
    assert mixed is not None
    return b, c, x, joined, mixed


def _taps(taps: int, joined: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each tap's distance in rows, and the slice of a run's joined rows that it reads."""
    for distance in range(taps):
        start = taps - 1 - distance
        yield distance, slice(start, start + joined.shape[1] - taps + 1)
