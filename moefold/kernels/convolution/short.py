"""A short causal convolution of each channel, in plain torch: between two gates, as LFM2 has it,

    y_t = c_t * sum over j < K of w[K - 1 - j] * (b * x)_(t - j)

or, as delta nets have it, an activation of the sum over ``x`` alone,

    y_t = silu(sum over j < K of w[K - 1 - j] * x_(t - j))

over rows of one document: a row at position p has p before it. T rows, C channels, K taps, P runs
of rows that lie apart, each with the J = K - 1 rows before it, which may be on another rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import RETURNED, GradientSink, made
from moefold.kernels.operand import Operand
from moefold.kernels.rows import wide


def short_convolution(
    x_TX: Tensor,
    before_PJC: Tensor | None,
    weight: Operand,
    positions_T: Tensor,
    *,
    gated: bool,
    n_valid: int | None = None,
    sink: GradientSink = RETURNED,
) -> Tensor:
    """Return ``y_TC`` in the rows' dtype; only what comes in is kept.

    Args:
        x_TX: of each row b, c and x, one after the other, where it is gated; else x alone.
        before_PJC: what is convolved, ``b * x`` or x, of the rows before each run; None where one
            run has all rows.
        weight: operand [C, 1, K]; the last tap is of the row itself.
        positions_T: of each row in its document.
        gated: whether it stands between gates, or before an activation.
        n_valid: the first so many rows count in the weight's gradient; None where all do.
        sink: where the weight's gradient goes.
    """
    given = weight.master, weight.value, positions_T, n_valid, sink, gated
    return _Convolution.apply(x_TX, before_PJC, *given)  # type: ignore[no-any-return]


def _joined(u_TC: Tensor, before_PJC: Tensor | None, reach: int) -> Tensor:
    """Return each run with the rows before it, [P, J + T / P, C]."""
    if before_PJC is None:
        before_PJC = u_TC.new_zeros(1, reach, u_TC.shape[1])
    runs = u_TC.unflatten(0, (len(before_PJC), -1))
    return torch.cat([before_PJC.to(u_TC.dtype), runs], 1)


def _places(taps: int, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield how far each tap reaches back, and which of a run's joined rows it reads."""
    for back in range(taps):
        start = taps - 1 - back
        yield back, slice(start, start + rows)


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
        ctx.master, ctx.n_valid, ctx.sink, ctx.gated = master, n_valid, sink, gated
        b, c, x = _parts(x_TX, gated)
        joined = _joined(x if b is None else b * x, before_PJC, value_C1K.shape[-1] - 1)
        z = _mixed(joined, value_C1K, positions_T)
        return (F.silu(z) if c is None else c * z).to(x_TX.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TX, before_PJC, value_C1K, positions_T = ctx.saved_tensors
        b, c, x = _parts(x_TX, ctx.gated)
        joined = _joined(x if b is None else b * x, before_PJC, value_C1K.shape[-1] - 1)
        z, dy = _mixed(joined, value_C1K, positions_T), wide(dy_TC)
        share = z.sigmoid()
        dz = dy * share * (1 + z * (1 - share)) if c is None else dy * c
        du, dbefore, dw = _unmixed(ctx, dz, joined, before_PJC, value_C1K, positions_T)
        if b is None:
            dx = du.to(x_TX.dtype, copy=True)  # and not the rows before, too
        else:
            dx = torch.cat([du * x, dy * z, du * b], 1).to(x_TX.dtype)
        return dx, dbefore, dw, None, None, None, None, None


def _parts(x_TX: Tensor, gated: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return b, c and x of the rows, in wide numbers; without gates x alone."""
    if not gated:
        return None, None, wide(x_TX)
    b, c, x = wide(x_TX).chunk(3, 1)
    return b, c, x


def _unmixed(
    ctx: Any,
    dz_TC: Tensor,
    joined: Tensor,
    before_PJC: Tensor | None,
    value_C1K: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of convolved rows, of those before each run, and of the weight."""
    taps, runs = value_C1K.shape[-1], len(joined)
    length = joined.shape[1] - taps + 1
    djoined, sums = torch.zeros_like(joined), list[Tensor]()
    rows = slice(ctx.n_valid)
    for back, place in _places(taps, length):
        there_T1 = (positions_T >= back)[:, None]
        share = dz_TC * value_C1K[:, 0, taps - 1 - back].to(dz_TC.dtype)
        djoined[:, place] += share.where(there_T1, 0).unflatten(0, (runs, -1))
        seen = joined[:, place].flatten(0, 1)
        sums.append((dz_TC * seen).where(there_T1, 0)[rows].sum(0))
    du = djoined[:, taps - 1 :].flatten(0, 1)
    dbefore = None if before_PJC is None else djoined[:, : taps - 1].to(before_PJC.dtype)
    if not ctx.needs_input_grad[2]:
        return du, dbefore, None
    found = torch.stack(sums[::-1], 1)[:, None].to(ctx.master.dtype)
    return du, dbefore, ctx.sink.deliver(ctx.master, made(found))  # a sum, made at once


def _mixed(joined: Tensor, value_C1K: Tensor, positions_T: Tensor) -> Tensor:
    """Return the convolution's rows [T, C]."""
    taps, mixed = value_C1K.shape[-1], None
    for back, place in _places(taps, joined.shape[1] - taps + 1):
        seen = joined[:, place].flatten(0, 1).where((positions_T >= back)[:, None], 0)
        part = seen * value_C1K[:, 0, taps - 1 - back].to(seen.dtype)
        mixed = part if mixed is None else mixed + part
    assert mixed is not None
    return mixed
