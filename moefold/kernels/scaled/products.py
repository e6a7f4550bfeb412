"""Linear products of low-precision codes with block scales: ``y = x w^T`` and its two gradients.

N rows, I in, O out, E groups. Rows are in runs (:mod:`moefold.kernels.scaled.rows`), those of
experts sorted as in :mod:`moefold.kernels.grouped.loop`; neither a block nor a matrix scale spans
two runs. Each of the three products quantises its own operands from wide numbers, with blocks along
the summed dim: features for ``y`` and ``dx``, rows for ``dw``.
:mod:`moefold.kernels.scaled.choose` selects the back end.

``nvfp4`` rounds ``dy`` stochastically and applies the Hadamard transform along rows to both
operands of ``dw``. Where ranks hold parts of a matrix, its amax is a maximum over them. It is
reduced when rows or gradients are quantised: deferred weight gradients need no communication.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.gradients import GradientSink
from moefold.kernels.quantise.blocks import (
    BLOCKS,
    Format,
    Quantised,
    Role,
    amax_of,
    encode,
    format_of,
)
from moefold.kernels.quantise.config import QUANTISE
from moefold.kernels.quantise.hadamard import SIZE, transform
from moefold.kernels.quantise.philox import MASK, chance
from moefold.kernels.rows import row_chunks, upcast_dtype
from moefold.kernels.scaled.choose import Path, choose
from moefold.kernels.scaled.emulated import Use
from moefold.kernels.scaled.operands import cat
from moefold.kernels.scaled.rows import RowRuns

Largest = Callable[[Tensor, Role, Sequence[int]], Tensor]
"""``largest(amax, role, matrices)``: the maximum of ``amax`` over ranks that hold parts of these
matrices (numbers) of a weight, or with delayed scaling the amax from earlier steps."""


class Recipe(NamedTuple):
    """Number format of a weight's products."""

    kind: str
    """A kind of :mod:`moefold.kernels.quantise.blocks`."""
    scales: str | None = None
    """Rule for scales; None is the kind's default."""
    narrow_dw: bool = True
    """Whether the weight's gradient is a product of codes too."""
    block: int | None = None
    """Elements of a block along the summed dim; None is the published number."""
    wire: bool = False
    """Whether rows for experts, and gradients of their results, are sent as codes."""
    hidden: int = 0
    """Elements of a block of pre-activations saved as codes; 0 saves them unchanged."""
    backend: str = "auto"
    """Requested back end."""

    @property
    def by_chance(self) -> bool:
        """Whether gradients of rows are rounded stochastically."""
        return self.kind == "nvfp4"

    @property
    def run(self) -> int:
        """Number of rows in one Hadamard transform."""
        return gcd(SIZE, self.block or SIZE)

    @property
    def hidden_form(self) -> Format | None:
        """Format of saved pre-activations: ``fp8_block`` for every kind; None saves them wide."""
        rule = self.scales if self.kind == "fp8_block" else None
        return format_of("fp8_block", "rows", rule, self.hidden) if self.hidden else None

    @property
    def of_matrices(self) -> bool:
        """Whether a whole matrix has a scale."""
        return QUANTISE.kinds[self.kind].of_matrices  # type: ignore[attr-defined]

    @property
    def one_set(self) -> bool:
        """Whether one set of a weight's codes serves products over either dim."""
        form = self.form("weight")
        return form.rows == form.columns

    def use(self, product: str, grouped: bool, dtype: torch.dtype, device: torch.device) -> Use:
        """Return the properties of product ``y``, ``dx`` or ``dw`` for the choice of a back end."""
        published = self.block in (None, BLOCKS[self.kind])
        rule = self.form("rows").scales
        return Use(self.kind, rule, published, product, grouped, dtype, device)

    def path(self, product: str, grouped: bool, x: Tensor) -> Path:
        """Return the back end of ``y``, ``dx`` or ``dw`` for rows or their gradient ``x``."""
        return choose(self.backend, self.use(product, grouped, x.dtype, x.device))

    def form(self, role: str) -> Format:
        """Return the format of rows, of their gradient, or of a weight."""
        return format_of(self.kind, role, self.scales, self.block)


def _mine(amax: Tensor, role: Role, matrices: Sequence[int]) -> Tensor:
    return amax


class Draw(NamedTuple):
    """Seed of stochastic rounding; random bits also depend on the numbers of row and column."""

    key: tuple[int, int]
    """Key of the run and of the weight; the last bit of the latter distinguishes two uses."""
    step: int
    columns: tuple[range, ...] = ()
    """Outputs of the whole weight on this rank; empty is all."""

    def numbers(self, number_N: Tensor, outputs: int, use: int) -> Tensor:
        """Return random multiples of 2^-16 in [0, 1) of shape [N, outputs]."""
        key = self.key[0] & MASK, (2 * self.key[1] + use) & MASK
        columns = self.columns or (range(outputs),)
        return torch.cat([chance(number_N, one, key, self.step) for one in columns], 1)


@dataclass(frozen=True)
class NarrowWeight:
    """A weight [(E,) O, I] as codes, for products over either dim."""

    recipe: Recipe
    along_inputs: Quantised
    along_outputs: Quantised
    amax: Tensor | None = None
    """Largest magnitudes of this rank's parts of the matrices, for delayed scaling."""

    @property
    def operands(self) -> tuple[Quantised, Quantised]:
        """Codes along inputs and along outputs, which may be one object."""
        return self.along_inputs, self.along_outputs

    @classmethod
    def of(cls, value: Tensor, recipe: Recipe, largest: Largest = _mine) -> "NarrowWeight":
        """Quantise a weight; square blocks serve both dims."""
        form = recipe.form("weight")
        here = _finite(amax_of(value)) if recipe.of_matrices else None
        amax = None if here is None else largest(here.clone(), "weight", range(here.numel()))
        made = encode(value, form, amax=amax)
        other = made if recipe.one_set else encode(value, form, -2)
        return cls(recipe, made, other, here)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight."""
        return self.along_inputs.dequantise(dtype)


class Kept(NamedTuple):
    """One operand of a weight's gradient, with all runs concatenated: codes [I, N] in blocks along
    rows with their scales, or rows themselves."""

    tensors: tuple[Tensor, ...]
    widths: tuple[tuple[int, ...], ...]
    """Width of each run's part, for each tensor."""
    rows: tuple[int, ...]
    """Rows of each run."""
    format: Format | None
    """Format of codes; None for rows."""

    @classmethod
    def of(cls, made: list[Quantised]) -> "Kept":
        """Concatenate one or more runs of codes."""
        sorts = zip(*([one.codes, one.scales, one.matrix_scale] for one in made), strict=True)
        there = [[part for part in sort if part is not None] for sort in sorts]
        given = [sort for sort in there if sort]
        widths = tuple(tuple(part.shape[1] for part in sort) for sort in given)
        rows = tuple(one.shape[1] for one in made)
        return cls(tuple(cat(sort, 1) for sort in given), widths, rows, made[0].format)

    def runs(self) -> Iterator[Tensor | Quantised]:
        """Yield the part of each run."""
        if self.format is None:
            yield from self.tensors[0].split(self.rows)
            return
        sorts = zip(self.tensors, self.widths, strict=True)
        for rows, parts in zip(
            self.rows, zip(*(t.split(w, 1) for t, w in sorts), strict=True), strict=True
        ):
            codes, scales, after = (*parts, None)[:3]
            assert codes is not None and scales is not None
            shape = torch.Size((codes.shape[0], rows))
            yield Quantised(codes, scales, after, self.format, -1, shape)


def joined(pieces: list[Quantised]) -> Quantised:
    """Concatenate codes of consecutive rows that were quantised in pieces of whole blocks."""
    first, *more = pieces
    if not more:
        return first
    scales = first.scales
    if first.format.columns is not None:
        scales = cat([one.scales for one in pieces])
    shape = torch.Size((sum(one.shape[0] for one in pieces), *first.shape[1:]))
    return replace(first, codes=cat([one.codes for one in pieces]), scales=scales, shape=shape)


class Read(NamedTuple):
    """Quantised rows, or gradients of rows."""

    made: list[Quantised]
    """Codes of each run in blocks along features."""
    kept: Kept | None
    """Operand of the weight's gradient; None if that is not needed."""


class NarrowOperand(NamedTuple):
    """A weight as an operand of products of codes."""

    master: Tensor
    """The parameter, which receives the gradient; its leading dims flatten to [(E,) O]."""
    codes: Callable[[], NarrowWeight]
    """Returns its codes; called in forward and again in backward."""
    draw: Draw
    """Seed of stochastic rounding of gradients of its rows."""
    largest: Largest = _mine
    note: Callable[[str, int, Tensor], None] | None = None
    """Called with role, group and rows of each operand, to search for faults."""
    once: Callable[[Tensor, object, Callable[[], Read]], Read] = lambda x, key, make: make()
    """``once(x, key, make)`` caches quantised rows for all products that read them."""


def scaled_product(
    x_NI: Tensor, weight: NarrowOperand, rows: RowRuns, sink: GradientSink
) -> Tensor:
    """Return ``y_NO`` in the dtype of the rows.

    Args:
        x_NI: rows.
        weight: the weight.
        rows: valid rows, in runs. Others are never read; their outputs and gradients are zero.
        sink: takes the weight's gradient.
    """
    for_dw = weight.master.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        codes = weight.codes()

        def make() -> Read:
            return _operands(x_NI, codes.recipe, "rows", rows, weight, for_dw)

        read = weight.once(x_NI, for_dw, make)
    given = codes, read, weight, rows, sink
    return _Scaled.apply(x_NI, weight.master, *given)  # type: ignore[return-value]


class _Scaled(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        master: Tensor,
        weight: NarrowWeight,
        read: Read,
        operand: NarrowOperand,
        rows: RowRuns,
        sink: GradientSink,
    ) -> Tensor:
        along = weight.along_inputs
        y_NO = x_NI.new_zeros(x_NI.shape[0], along.shape[-2])
        backend = weight.recipe.path("y", rows.grouped, x_NI).backend
        rows.put(backend.each(read.made, along.mT, rows.groups, x_NI.dtype), y_NO)
        kept = read.kept
        # Tensors are saved by autograd, so that recompute can drop them.
        ctx.save_for_backward(rows.order_N, *(kept.tensors if kept else ()))
        ctx.operand, ctx.rows, ctx.sink = operand, rows._replace(order_N=None), sink
        ctx.kept = kept and kept._replace(tensors=())
        return y_NO

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        order_N, *kept = ctx.saved_tensors
        operand, rows = ctx.operand, ctx.rows._replace(order_N=order_N)
        wide = upcast_dtype(dy_NO)
        weight, wanted = operand.codes(), ctx.needs_input_grad
        along = weight.along_outputs
        made, dy = _operands(dy_NO, weight.recipe, "gradient", rows, operand, wanted[1])
        dx_NI = None
        if wanted[0]:
            dx_NI = dy_NO.new_zeros(dy_NO.shape[0], along.shape[-1])
            backend = weight.recipe.path("dx", rows.grouped, dy_NO).backend
            rows.put(backend.each(made, along, rows.groups, dy_NO.dtype), dx_NI)
        dw = None
        if wanted[1]:
            x = ctx.kept and ctx.kept._replace(tensors=tuple(kept))
            master, matrices = operand.master, along.shape[0] if rows.grouped else 1
            times = weight.recipe.path("dw", rows.grouped, dy_NO).backend.times
            groups = rows.groups

            def product(into: Tensor | None) -> Tensor:
                if into is None:
                    into = torch.zeros(master.shape, dtype=wide, device=master.device)
                if dy is not None and x is not None:
                    into_EOI = into.view(matrices, -1, into.shape[-1])
                    _add_gradients(groups, dy, x, into_EOI, partial(times, dtype=wide))
                return into

            dw = ctx.sink.deliver(master, product)
        return dx_NI, dw, *(None,) * 5


def _operands(
    x_NI: Tensor, recipe: Recipe, role: Role, rows: RowRuns, weight: NarrowOperand, for_dw: bool
) -> Read:
    """Return each run's codes along features, and the operand of the weight's gradient."""
    inside = rows.inside(x_NI)
    parts = [inside[start:end] for _, start, end in rows.runs]
    if weight.note is not None:
        for group, part in zip(rows.groups, parts, strict=True):
            weight.note(role, group, part)
    narrow_dw, turns = for_dw and recipe.narrow_dw, recipe.kind == "nvfp4"
    form, block, width = recipe.form(role), recipe.run, x_NI.shape[1]
    # In pieces of whole blocks of rows, as casts and random numbers take many bytes per element.
    whole = lcm(form.columns or 1, block)
    cuts = [row_chunks(part, whole) or [slice(0)] for part in parts]

    def turned(part: Tensor) -> Tensor:
        """Return rows, transformed if the format does so, for blocks along rows."""
        return transform(part.mT, block).mT if turns else part

    def largest(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        pairs = zip(parts, cuts, strict=True)
        amaxes = ([amax_of(change(part[cut])) for cut in at] for part, at in pairs)
        return [torch.stack(each).amax(0) for each in amaxes]

    amax: list[Tensor | None] = [None] * (2 * len(parts))
    if recipe.of_matrices and parts:
        # The transform changes the amax; without it both directions have one amax.
        read = largest(lambda part: part) + (largest(turned) if turns and narrow_dw else [])
        groups = rows.groups * (len(read) // len(parts))
        found = weight.largest(_finite(torch.stack(read)), role, groups)
        amax = [*found, *found] if len(read) == len(parts) else [*found]

    def coded(dim: int, amaxes: list[Tensor | None]) -> Iterator[Quantised]:
        """Yield the codes of each run, in blocks along features or along rows."""
        for run, (part, at, most) in enumerate(zip(parts, cuts, amaxes, strict=True)):
            drawn, made = None, list[Quantised]()
            for cut in at:
                if role == "gradient" and recipe.by_chance:
                    number = rows.numbers(run, x_NI.device)[cut]
                    number = number if dim == -1 else _filled(number, block)
                    drawn = weight.draw.numbers(number, width, int(dim == -2))
                piece = part[cut] if dim == -1 else turned(part[cut])
                made.append(encode(piece, form, dim, drawn, most))
            yield joined(made)

    made = list(coded(-1, amax[: len(parts)]))
    if not parts or not for_dw:
        return Read(made, None)
    if not narrow_dw:
        return Read(made, Kept((inside,), (), tuple(map(len, parts)), None))
    return Read(made, Kept.of([one.mT for one in coded(-2, amax[len(parts) :])]))


def _finite(amax: Tensor) -> Tensor:
    # A maximum over ranks could lose a NaN, but not an Inf.
    return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _filled(number_N: Tensor, run: int) -> Tensor:
    """Return numbers of rows, including the padding of their last transform."""
    return (number_N[::run, None] + torch.arange(run, device=number_N.device)).flatten()


def _add_gradients(
    groups: list[int],
    dy: Kept,
    x: Kept,
    into_EOI: Tensor,
    times: Callable[[Quantised, Quantised], Tensor],
) -> None:
    """Add each run's contribution to the gradient of its matrix."""
    for group, one, other in zip(groups, dy.runs(), x.runs(), strict=True):
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor)
            into_EOI[group] += one.mT.to(into_EOI.dtype) @ other.to(into_EOI.dtype)
        elif one.shape[-1]:
            assert isinstance(other, Quantised)
            into_EOI[group] += times(one, other.mT)
