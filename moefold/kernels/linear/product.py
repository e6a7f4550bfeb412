"""The linear product ``y_TO = x_TI w_OI^T`` of all layers, and its two gradients.

T rows, I in, O out. Padding rows come last and are sliced off for the weight's gradient, not masked
by multiplication, so that a NaN in one stays in its row and results do not depend on their number.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import AUTOGRAD_SINK, GradientSink, precomputed
from moefold.kernels.operand import Operand
from moefold.kernels.rows import row_multiple, upcast

RowTransform = Callable[[Tensor], Tensor]
"""A linear, elementwise and repeatable function of rows, such as dropout; its own gradient."""


def linear(
    x_TI: Tensor,
    weight: Operand,
    *,
    n_valid: int | None = None,
    sink: GradientSink = AUTOGRAD_SINK,
    transform: RowTransform = lambda rows: rows,
) -> Tensor:
    """Return ``x_TI @ weight^T`` of shape [T, O] in the operand's dtype, plus that of its adapter.

    Args:
        x_TI: rows in the operand's dtype or a narrower one, in which they are then saved.
        weight: operand [O, I], or several stacked [..., O, I], whose outputs are concatenated.
        n_valid: number of leading rows in the weight's gradient; None is all.
        sink: takes the weight's gradient.
        transform: applied to the rows before the product; only its input is saved.
    """
    y_TO = _Linear.apply(x_TI, weight.master, weight.value, n_valid, sink, transform)
    low = weight.low_rank
    if low is None:
        return y_TO

    def dropped(x_TI: Tensor) -> Tensor:
        return low.apply_dropout(transform(x_TI))

    inner_TR = _Linear.apply(x_TI, low.a.master, low.a.value, n_valid, sink, dropped)
    return y_TO.add(linear(inner_TR, low.b, n_valid=n_valid, sink=sink), alpha=low.scale)


def add_bias(
    y_TO: Tensor, bias: Operand, *, n_valid: int | None = None, sink: GradientSink = AUTOGRAD_SINK
) -> Tensor:
    """Return ``y_TO + bias_O`` in the rows' dtype; other arguments as of :func:`linear`."""
    return _AddBias.apply(y_TO, bias.master, bias.value, n_valid, sink)


def weight_gradient(dy_TO: Tensor, x_TI: Tensor, into_OI: Tensor | None) -> Tensor:
    """Return ``dy^T x`` of shape [O, I], added to ``into_OI`` in place if given.

    Where the device supports it, products of 16-bit factors are summed and returned in fp32,
    without rounding to the factors' dtype.
    """
    if x_TI.dtype.itemsize == 2 and accumulates_in_fp32(x_TI.device.type):
        if into_OI is None:
            return torch.mm(dy_TO.t(), x_TI, out_dtype=torch.float32)
        if into_OI.dtype == torch.float32:
            return torch.addmm(into_OI, dy_TO.t(), x_TI, out_dtype=torch.float32, out=into_OI)
    rest = x_TI.shape[0] % row_multiple(x_TI.shape[0], x_TI)
    if rest:
        # Zeros pad the remaining rows to a multiple for which a product is already compiled.
        dw_OI = weight_gradient(dy_TO[:-rest], x_TI[:-rest], into_OI)
        into_OI = upcast(dw_OI) if into_OI is None else into_OI
        padding = (0, 0, 0, row_multiple(x_TI.shape[0], x_TI) - rest)
        dy_TO, x_TI = (F.pad(rows[-rest:], padding) for rows in (dy_TO, x_TI))
    if into_OI is None:
        return dy_TO.t() @ x_TI
    if into_OI.dtype == x_TI.dtype:
        return into_OI.addmm_(dy_TO.t(), x_TI)
    return into_OI.add_(dy_TO.t() @ x_TI)


def accumulates_in_fp32(device: str) -> bool:
    """Return whether a device sums products of 16-bit factors in fp32; ``meta`` is as CUDA."""
    return device == "meta" or (device == "cuda" and not torch.version.hip)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        master: Tensor,
        value_OI: Tensor,
        n_valid: int | None,
        sink: GradientSink,
        transform: RowTransform,
    ) -> Tensor:
        # Only the weight's gradient reads the rows.
        ctx.shape = value_OI.shape
        value_OI = value_OI.flatten(0, -2)
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None, value_OI)
        ctx.dtype = x_TI.dtype
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        ctx.transform = transform
        return transform(x_TI.to(value_OI.dtype)) @ value_OI.t()

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, value_OI = ctx.saved_tensors
        n_valid = ctx.n_valid
        transform = ctx.transform
        shape = ctx.shape
        dx = ctx.transform(dy_TO @ value_OI).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            # A queued product must hold only rows, not the graph or context that lead to others.
            x_TI = x_TI.detach()

            def product(into: Tensor | None) -> Tensor:
                flat = None if into is None else into.view(-1, into.shape[-1])
                dy = dy_TO[:n_valid]
                x = transform(x_TI.to(dy_TO.dtype))[:n_valid]
                return weight_gradient(dy, x, flat).view(shape)

            dw = ctx.sink.deliver(ctx.master, product)
        return dx, dw, None, None, None, None


class _AddBias(Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_TO: Tensor,
        master: Tensor,
        value_O: Tensor,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        return y_TO + value_O.to(y_TO.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        db = None
        if ctx.needs_input_grad[1]:
            summed_O = dy_TO[: ctx.n_valid].sum(0, dtype=ctx.master.dtype)
            db = ctx.sink.deliver(ctx.master, precomputed(summed_O))
        return dy_TO, db, None, None, None
