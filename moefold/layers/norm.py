"""RMSNorm and its variants as layers. T rows, D width."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.collectives import sum_over
from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.gradients import GradientSink
from moefold.kernels.norm.rms import add_and_norm, norm_and_rotate, rms_norm
from moefold.kernels.operand import Operand
from moefold.kernels.rope.rotate import rotate
from moefold.kernels.rows import upcast_dtype
from moefold.layers.flow import Flow
from moefold.layers.rope import Angles


class RmsNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim."""

    fused_add = True
    """Whether a fused kernel computes the sum of rows and its norm."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def scale(self, flow: Flow) -> Operand:
        """Return the factors on normed rows as an operand."""
        return flow.operand(self.weight, self.weight.dtype)

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        """Return the normed rows; x is [T, ..., width]."""

        def normed(x: Tensor) -> Tensor:
            weight = self.scale(flow)
            return rms_norm(x, weight, self.epsilon, n_valid=flow.n_valid, sink=flow.sink)

        return flow.saved_tensors.run("norms", normed, x)

    def add_and_norm(self, x: Tensor, branch: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
        """Return ``x + branch``, the residual rows, and their norm."""
        # Recomputing the norm starts from the sum, which is then saved as its input.
        if "norms" in flow.saved_tensors.kinds or not (self.fused_add and uses_triton(x)):
            total = x + branch
            return total, self(total, flow)
        weight = self.scale(flow)
        options = {"n_valid": flow.n_valid, "sink": flow.sink}
        total, normed = add_and_norm(x, branch, weight, self.epsilon, **options)
        flow.saved_tensors.set_owner("norms", normed)
        return total, normed

    def norm_and_rotate(self, x_THd: Tensor, angles: Angles, layout: str, flow: Flow) -> Tensor:
        """Return normed heads, rotated by their rows' angles."""
        if not uses_triton(x_THd):
            return rotate(self(x_THd, flow), *angles, layout)
        # Normed heads before rotation are never saved, so recompute has nothing to drop.
        weight = self.scale(flow)
        options = {"n_valid": flow.n_valid, "sink": flow.sink}
        with flow.saved_tensors.scope("norms", x_THd):
            return norm_and_rotate(x_THd, weight, self.epsilon, *angles, layout, **options)


class LayerNorm(RmsNorm):
    """LayerNorm without bias: RMSNorm of rows minus their mean; it saves the differences."""

    fused_add = False

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        """Return the normed rows."""
        # A 16-bit mean has a relative error that may be large against the differences.
        mean = x.mean(-1, keepdim=True, dtype=upcast_dtype(x))
        return super().forward((x - mean).to(x.dtype), flow)


class ZeroCentredNorm(RmsNorm):
    """RMSNorm with factors ``1 + weight``, which weight decay pulls towards one."""

    def scale(self, flow: Flow) -> Operand:
        """Return ``1 + weight``."""
        weight = super().scale(flow)
        return replace(weight, value=weight.value + 1)


NORMS: Mapping[str, type[RmsNorm]] = {
    "rms": RmsNorm,
    "layer": LayerNorm,
    "zero_centred": ZeroCentredNorm,
}
"""Norms of residual rows by kind (``Decoder.norm``)."""


class ShardedRmsNorm(RmsNorm):
    """RMSNorm over a width that tp cuts: the mean square is of the whole row."""

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        """Return this rank's part [T, D / tp] of the normed rows."""
        ranks = flow.world.group("tp")
        if ranks.size == 1:
            return super().forward(x, flow)

        def normed(x: Tensor) -> Tensor:
            wide = x.to(upcast_dtype(x))
            square_T1 = sum_over(wide.square().sum(-1, keepdim=True), ranks)
            scale_T1 = (square_T1 / (x.shape[-1] * ranks.size) + self.epsilon).rsqrt()
            weight = self.scale(flow)
            args = weight.master, weight.value, flow.n_valid, flow.sink
            scaled = _ScaleRows.apply(wide, scale_T1, *args)
            return scaled.to(x.dtype)

        return flow.saved_tensors.run("norms", normed, x)


class UnitNorm(nn.Module):
    """``x / rms(x)`` over the last dim, without a weight."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        """Return the normed rows."""
        return flow.saved_tensors.run("norms", lambda x: _Unit.apply(x, self.epsilon), x)


class _Unit(Function):
    """Saves the rows and one number per row, as RMSNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        wide = x.to(upcast_dtype(x))
        scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        ctx.save_for_backward(x, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        normed = x * scale
        wide = dy.to(scale.dtype)
        dx = scale * (wide - normed * (wide * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), None


class _ScaleRows(Function):
    """``x_TD * scale_T1 * weight_D``, for which only the inputs are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        scale_T1: Tensor,
        master: Tensor,
        weight_D: Tensor,
        n_valid: int | None,
        sink: GradientSink,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, scale_T1, weight_D)
        ctx.master = master
        ctx.n_valid = n_valid
        ctx.sink = sink
        return x_TD * scale_T1 * weight_D

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, scale_T1, weight_D = ctx.saved_tensors
        rows = slice(ctx.n_valid)

        def product(into_D: Tensor | None) -> Tensor:
            dw_D = (dy_TD[rows] * (x_TD * scale_T1)[rows]).sum(0)
            return dw_D if into_D is None else into_D.add_(dw_D)

        dx_TD = dy_TD * weight_D
        dw = ctx.sink.deliver(ctx.master, product) if ctx.needs_input_grad[2] else None
        return dx_TD * scale_T1, (dx_TD * x_TD).sum(-1, keepdim=True), dw, None, None, None
