"""Products of a weight on codes and block scales: ``y = x w^T`` and its two gradients.

N rows, I in, O out, E groups. Rows are those of one matrix, or sorted by group as in
:mod:`moefold.kernels.grouped.loop`; a block, and the largest of a matrix, never span groups. Each
of the three products has operands of its own, made from wide numbers, with blocks along the dim
that it sums: features for ``y`` and ``dx``, rows for ``dw``. Codes times block scales are summed
(fp64 for rows in fp64, else fp32), the scales of whole matrices come after the sum.

``nvfp4`` rounds ``dy`` by chance, and both operands of ``dw`` pass the Hadamard transform along the
rows. This is an emulation in plain torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.kernels.gradients import GradientSink
from moefold.kernels.grouped.loop import spans
from moefold.kernels.quantise.blocks import Format, Quantised, encode, format_of
from moefold.kernels.quantise.hadamard import transform
from moefold.kernels.quantise.philox import MASK, chance

GROUP = 40
"""Bits of a row's number below those of its group."""


class Recipe(NamedTuple):
    """What the products of a weight run in."""

    kind: str
    """A kind of :mod:`moefold.kernels.quantise.blocks`."""
    scales: str | None = None
    """Its rule for scales; None is its own."""
    narrow_dw: bool = True
    """Whether the weight's gradient is a product of codes too."""
    block: int | None = None
    """Elements along the summed dim in place of the published number."""

    @property
    def by_chance(self) -> bool:
        """Whether gradients of rows are rounded by chance."""
        return self.kind == "nvfp4"

    def form(self, role: str) -> Format:
        """Return the format of rows, of their gradient, or of a weight."""
        return format_of(self.kind, role, self.scales, self.block)


class Draw(NamedTuple):
    """What random bits are a function of, beside a row's and a column's number."""

    key: tuple[int, int]
    """Of the run and of the weight, whose last bit tells the two uses apart."""
    step: int
    first: Tensor
    """int64 [1]: number of the first row in the step."""

    def numbers(self, rows: int, columns: int, use: int, group: int) -> Tensor:
        """Return multiples of 2^-16 of shape [rows, columns]."""
        row_N = torch.arange(rows, device=self.first.device) + self.first + (group << GROUP)
        key = self.key[0] & MASK, (2 * self.key[1] + use) & MASK
        return chance(row_N, range(columns), key, self.step)


@dataclass(frozen=True)
class NarrowWeight:
    """A weight [(E,) O, I] as codes, for either dim that a product sums."""

    recipe: Recipe
    along_inputs: Quantised
    along_outputs: Quantised

    @classmethod
    def of(cls, value: Tensor, recipe: Recipe) -> "NarrowWeight":
        """Make the codes; blocks that are as wide as long serve both dims."""
        form = recipe.form("weight")
        made = encode(value, form)
        other = made if form.rows == form.columns else encode(value, form, -2)
        return cls(recipe, made, other)


def times(a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b``, blocks of both along K, summed in ``dtype``."""
    y_NM = a_NK.factors(dtype) @ b_KM.factors(dtype)
    for after in (a_NK.after, b_KM.after):
        if after is not None:
            y_NM *= after
    return y_NM


class NarrowOperand(NamedTuple):
    """A weight as products on codes see it."""

    master: Tensor
    """The parameter, which receives the gradient; its leading dims flatten to [(E,) O]."""
    codes: Callable[[], NarrowWeight]
    """Gives its codes, in forward and again in backward."""
    draw: Draw
    """What stochastic rounding of its rows' gradient draws from."""


def scaled_product(
    x_NI: Tensor, weight: NarrowOperand, ends: Tensor | int, sink: GradientSink
) -> Tensor:
    """Return ``y_NO`` in the dtype of the rows.

    Args:
        x_NI: rows.
        weight: its codes, and where they come from.
        ends: how many rows count, the first ones; or int32 end row of each group. Rows past the
            end are never read; their outputs and gradients are zero.
        sink: where the weight's gradient goes.
    """
    return _Scaled.apply(x_NI, weight.master, weight.codes, ends, sink, weight.draw)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        master: Tensor,
        codes: Callable[[], NarrowWeight],
        ends: Tensor | int,
        sink: GradientSink,
        draw: Draw,
    ) -> Tensor:
        weight, wide = codes(), _sum_of(x_NI)
        recipe, grouped = weight.recipe, isinstance(ends, Tensor)
        groups = spans(ends) if isinstance(ends, Tensor) else [(0, 0, ends)]
        along = weight.along_inputs
        y_NO = x_NI.new_zeros(x_NI.shape[0], along.shape[-2])
        held: list[Tensor] = []
        forms: list[_Form] = []
        for group, start, end in groups:
            part, matrix = x_NI[start:end], along.matrix(group) if grouped else along
            if start < end:
                y_NO[start:end] = times(encode(part, recipe.form("rows")), matrix.mT, wide)
            if ctx.needs_input_grad[1]:
                tensors, form = _Form.of(weight_operand(part, recipe, "rows"))
                held += tensors
                forms.append(form)
        ctx.save_for_backward(*held)
        ctx.master, ctx.codes, ctx.sink, ctx.draw = master, codes, sink, draw
        ctx.groups, ctx.forms, ctx.grouped = groups, forms, grouped
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        weight, wide, draw = ctx.codes(), _sum_of(dy_NO), ctx.draw
        recipe, along = weight.recipe, weight.along_outputs
        dx_NI = dy_NO.new_zeros(dy_NO.shape[0], along.shape[-1])
        operands = []
        for group, start, end in ctx.groups:
            part = dy_NO[start:end]
            matrix = along.matrix(group) if ctx.grouped else along
            if ctx.needs_input_grad[0] and start < end:
                drawn = draw.numbers(*part.shape, 0, group) if recipe.by_chance else None
                made = encode(part, recipe.form("gradient"), -1, drawn)
                dx_NI[start:end] = times(made, matrix, wide)
            if ctx.needs_input_grad[1]:
                operands.append(weight_operand(part, recipe, "gradient", draw, group))
        dw = None
        if ctx.needs_input_grad[1]:
            tensors, pairs = iter(ctx.saved_tensors), []
            for dy, form in zip(operands, ctx.forms, strict=True):
                pairs.append((dy, form.made(tensors)))

            def product(into: Tensor | None) -> Tensor:
                return _weight_gradients(pairs, ctx.master, into, wide)

            dw = ctx.sink.deliver(ctx.master, product)
        return dx_NI if ctx.needs_input_grad[0] else None, dw, None, None, None, None


def weight_operand(
    part_NI: Tensor, recipe: Recipe, role: str, draw: Draw | None = None, group: int = 0
) -> Tensor | Quantised:
    """Return what the weight's gradient reads of a group's rows: codes [I, N] along them.

    Or the rows themselves where that product is wide.
    """
    if not recipe.narrow_dw:
        return part_NI
    turned = transform(part_NI.mT) if recipe.kind == "nvfp4" else part_NI.mT
    drawn = None
    if draw is not None and recipe.by_chance:
        drawn = draw.numbers(turned.shape[1], turned.shape[0], 1, group).mT
    return encode(turned, recipe.form(role), -1, drawn)


def _weight_gradients(
    pairs: list[tuple[Tensor | Quantised, Tensor | Quantised]],
    master: Tensor,
    into: Tensor | None,
    wide: torch.dtype,
) -> Tensor:
    """Return the gradient of each group's matrix, in the master's shape."""
    if into is None:
        into = torch.zeros(master.shape, dtype=wide, device=master.device)
    matrices = into.view(len(pairs), -1, into.shape[-1])
    for matrix, (dy, x) in zip(matrices, pairs, strict=True):
        if isinstance(dy, Tensor):
            assert isinstance(x, Tensor)
            matrix += dy.mT.to(wide) @ x.to(wide)
        elif dy.shape[-1]:
            assert isinstance(x, Quantised)
            matrix += times(dy, x.mT, wide)
    return into


class _Form(NamedTuple):
    """What an operand is beside its tensors, which autograd keeps."""

    format: Format | None
    shape: torch.Size
    tensors: int

    @classmethod
    def of(cls, made: Tensor | Quantised) -> "tuple[list[Tensor], _Form]":
        if isinstance(made, Tensor):
            return [made], cls(None, made.shape, 1)
        after = made.matrix_scale
        tensors = [made.codes, made.scales] + ([] if after is None else [after])
        return tensors, cls(made.format, made.shape, len(tensors))

    def made(self, tensors: Iterator[Tensor]) -> Tensor | Quantised:
        codes, *rest = (next(tensors) for _ in range(self.tensors))
        if self.format is None:
            return codes
        scales, after = (*rest, None)[:2]
        assert scales is not None
        return Quantised(codes, scales, after, self.format, -1, self.shape)


def _sum_of(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
