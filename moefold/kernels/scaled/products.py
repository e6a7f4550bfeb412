"""Linear products of low-precision codes with block scales: ``y = x w^T`` and its two gradients.

N rows, I in, O out, E groups. Rows are in runs (:mod:`moefold.kernels.scaled.rows`), those of
experts sorted as in :mod:`moefold.kernels.grouped.loop`; neither a block nor a matrix scale spans
two runs. Each of the three products quantises its operands from wide numbers, with blocks along the
summed dim: features for ``y`` and ``dx``, rows for ``dw``.
:mod:`moefold.kernels.scaled.choose` selects the back end.

``nvfp4`` rounds ``dy`` stochastically and applies the Hadamard transform along rows to both
operands of ``dw``. Where ranks hold parts of a matrix, its amax is a maximum over them,
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
from moefold.kernels.scaled.choose import BackendChoice, choose_backend
from moefold.kernels.scaled.emulated import ProductSpec
from moefold.kernels.scaled.operands import cat
from moefold.kernels.scaled.rows import RowRuns

ReduceAmax = Callable[[Tensor, Role, Sequence[int]], Tensor]
"""``reduce_amax(amax, role, matrices)``: the maximum of ``amax`` over ranks with parts of these
matrices (indices) of a weight, or with delayed scaling the amax of earlier steps."""


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
    def stochastic_gradients(self) -> bool:
        """Whether gradients of rows are rounded stochastically."""
        return self.kind == "nvfp4"

    @property
    def hadamard_size(self) -> int:
        """Number of rows in one Hadamard transform."""
        return gcd(SIZE, self.block or SIZE)

    @property
    def hidden_format(self) -> Format | None:
        """Format of saved pre-activations: ``fp8_block`` for every kind; None saves them wide."""
        rule = self.scales if self.kind == "fp8_block" else None
        return format_of("fp8_block", "rows", rule, self.hidden) if self.hidden else None

    @property
    def has_matrix_scale(self) -> bool:
        """Whether each whole matrix has a scale."""
        return QUANTISE.kinds[self.kind].has_matrix_scale  # type: ignore[attr-defined]

    @property
    def has_square_blocks(self) -> bool:
        """Whether blocks of weights are square, so that codes serve products over either dim."""
        form = self.format("weight")
        return form.rows == form.columns

    def product_spec(
        self, product: str, grouped: bool, dtype: torch.dtype, device: torch.device
    ) -> ProductSpec:
        """Return the properties of product ``y``, ``dx`` or ``dw`` that a back end is chosen by."""
        published = self.block in (None, BLOCKS[self.kind])
        scale_rule = self.format("rows").scales
        return ProductSpec(self.kind, scale_rule, published, product, grouped, dtype, device)

    def choose_backend(self, product: str, grouped: bool, x: Tensor) -> BackendChoice:
        """Return the back end for ``y``, ``dx`` or ``dw`` of rows, or of their gradient, ``x``."""
        return choose_backend(self.backend, self.product_spec(product, grouped, x.dtype, x.device))

    def format(self, role: str) -> Format:
        """Return the format of rows, of their gradient, or of a weight."""
        return format_of(self.kind, role, self.scales, self.block)


def _local_amax(amax: Tensor, role: Role, matrices: Sequence[int]) -> Tensor:
    return amax


class RoundingSeed(NamedTuple):
    """Seed of stochastic rounding; random numbers also depend on row and column."""

    key: tuple[int, int]
    """Key of the run and of the weight; the last bit of the latter distinguishes two uses."""
    step: int
    columns: tuple[range, ...] = ()
    """Outputs of the whole weight on this rank; empty is all."""

    def draw(self, number_N: Tensor, outputs: int, direction: int) -> Tensor:
        """Return random multiples of 2^-16 in [0, 1), shape [N, outputs].

        ``direction``: 0 for blocks along features, 1 along rows.
        """
        key = self.key[0] & MASK, (2 * self.key[1] + direction) & MASK
        columns = self.columns or (range(outputs),)
        return torch.cat([chance(number_N, block, key, self.step) for block in columns], 1)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [(E,) O, I] as codes, for products over either dim."""

    recipe: Recipe
    along_inputs: Quantised
    along_outputs: Quantised
    amax: Tensor | None = None
    """Largest magnitudes of this rank's parts of the matrices, for delayed scaling."""

    @property
    def operands(self) -> tuple[Quantised, Quantised]:
        """Codes along inputs and along outputs, which may be the same object."""
        return self.along_inputs, self.along_outputs

    @classmethod
    def of(
        cls, value: Tensor, recipe: Recipe, reduce_amax: ReduceAmax = _local_amax
    ) -> "QuantisedWeight":
        """Quantise a weight; square blocks serve both dims."""
        form = recipe.format("weight")
        local = _nan_to_inf(amax_of(value)) if recipe.has_matrix_scale else None
        amax = None if local is None else reduce_amax(local.clone(), "weight", range(local.numel()))
        along_inputs = encode(value, form, amax=amax)
        along_outputs = along_inputs if recipe.has_square_blocks else encode(value, form, -2)
        return cls(recipe, along_inputs, along_outputs, local)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight."""
        return self.along_inputs.dequantise(dtype)


class SavedOperand(NamedTuple):
    """An operand of a weight's gradient, all runs concatenated: codes [I, N] in blocks along rows
    with their scales, or unquantised rows."""

    tensors: tuple[Tensor, ...]
    widths: tuple[tuple[int, ...], ...]
    """Width of each run's part, for each tensor."""
    rows: tuple[int, ...]
    """Rows of each run."""
    format: Format | None
    """Format of codes; None for rows."""

    @classmethod
    def of(cls, quantised: list[Quantised]) -> "SavedOperand":
        """Concatenate one or more runs of codes."""
        kinds = zip(*([q.codes, q.scales, q.matrix_scale] for q in quantised), strict=True)
        present = [[tensor for tensor in kind if tensor is not None] for kind in kinds]
        tensors = [kind for kind in present if kind]
        widths = tuple(tuple(tensor.shape[1] for tensor in kind) for kind in tensors)
        rows = tuple(q.shape[1] for q in quantised)
        return cls(tuple(cat(kind, 1) for kind in tensors), widths, rows, quantised[0].format)

    def runs(self) -> Iterator[Tensor | Quantised]:
        """Yield the part of each run."""
        if self.format is None:
            yield from self.tensors[0].split(self.rows)
            return
        kinds = zip(self.tensors, self.widths, strict=True)
        for rows, run_tensors in zip(
            self.rows, zip(*(t.split(w, 1) for t, w in kinds), strict=True), strict=True
        ):
            codes, scales, matrix_scale = (*run_tensors, None)[:3]
            assert codes is not None and scales is not None
            shape = torch.Size((codes.shape[0], rows))
            yield Quantised(codes, scales, matrix_scale, self.format, -1, shape)


def concatenate(chunks: list[Quantised]) -> Quantised:
    """Concatenate codes of consecutive rows that were quantised in chunks of whole blocks."""
    first, *others = chunks
    if not others:
        return first
    scales = first.scales
    if first.format.columns is not None:
        scales = cat([chunk.scales for chunk in chunks])
    rows = sum(chunk.shape[0] for chunk in chunks)
    shape = torch.Size((rows, *first.shape[1:]))
    codes = cat([chunk.codes for chunk in chunks])
    return replace(first, codes=codes, scales=scales, shape=shape)


class QuantisedRows(NamedTuple):
    """Quantised rows, or gradients of rows."""

    codes: list[Quantised]
    """Codes of each run in blocks along features."""
    saved: SavedOperand | None
    """Operand of the weight's gradient; None if not needed."""


class QuantisedOperand(NamedTuple):
    """A weight as an operand of products of codes."""

    master: Tensor
    """The parameter, which receives the gradient; its leading dims flatten to [(E,) O]."""
    codes: Callable[[], QuantisedWeight]
    """Returns the codes; called in forward and again in backward."""
    seed: RoundingSeed
    """Seed of the stochastic rounding of its rows' gradients."""
    reduce_amax: ReduceAmax = _local_amax
    on_operand: Callable[[str, int, Tensor], None] | None = None
    """Called with role, group and values of each operand, to trace faults."""
    cache: Callable[[Tensor, object, Callable[[], QuantisedRows]], QuantisedRows] = (
        lambda x, key, make: make()
    )
    """``cache(x, key, make)`` shares quantised rows between all products that read them."""


def scaled_product(
    x_NI: Tensor, weight: QuantisedOperand, rows: RowRuns, sink: GradientSink
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

        def make() -> QuantisedRows:
            return _operands(x_NI, codes.recipe, "rows", rows, weight, for_dw)

        quantised = weight.cache(x_NI, for_dw, make)
    args = codes, quantised, weight, rows, sink
    return _ScaledProduct.apply(x_NI, weight.master, *args)


class _ScaledProduct(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        master: Tensor,
        weight: QuantisedWeight,
        quantised: QuantisedRows,
        operand: QuantisedOperand,
        rows: RowRuns,
        sink: GradientSink,
    ) -> Tensor:
        along = weight.along_inputs
        y_NO = x_NI.new_zeros(x_NI.shape[0], along.shape[-2])
        backend = weight.recipe.choose_backend("y", rows.grouped, x_NI).backend
        rows.scatter(
            backend.multiply_runs(quantised.codes, along.mT, rows.groups, x_NI.dtype), y_NO
        )
        saved = quantised.saved
        # Tensors are saved by autograd, so that recompute can drop them.
        ctx.save_for_backward(rows.order_N, *(saved.tensors if saved else ()))
        ctx.operand = operand
        ctx.rows = rows._replace(order_N=None)
        ctx.sink = sink
        ctx.saved = saved and saved._replace(tensors=())
        return y_NO

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        order_N, *tensors = ctx.saved_tensors
        operand = ctx.operand
        rows = ctx.rows._replace(order_N=order_N)
        wide = upcast_dtype(dy_NO)
        weight = operand.codes()
        needs_grad = ctx.needs_input_grad
        along = weight.along_outputs
        codes, dy = _operands(dy_NO, weight.recipe, "gradient", rows, operand, needs_grad[1])
        dx_NI = None
        if needs_grad[0]:
            dx_NI = dy_NO.new_zeros(dy_NO.shape[0], along.shape[-1])
            backend = weight.recipe.choose_backend("dx", rows.grouped, dy_NO).backend
            rows.scatter(backend.multiply_runs(codes, along, rows.groups, dy_NO.dtype), dx_NI)
        dw = None
        if needs_grad[1]:
            x = ctx.saved and ctx.saved._replace(tensors=tuple(tensors))
            master = operand.master
            matrices = along.shape[0] if rows.grouped else 1
            multiply = weight.recipe.choose_backend("dw", rows.grouped, dy_NO).backend.multiply
            groups = rows.groups

            def product(into: Tensor | None) -> Tensor:
                if into is None:
                    into = torch.zeros(master.shape, dtype=wide, device=master.device)
                if dy is not None and x is not None:
                    into_EOI = into.view(matrices, -1, into.shape[-1])
                    _add_gradients(groups, dy, x, into_EOI, partial(multiply, dtype=wide))
                return into

            dw = ctx.sink.deliver(master, product)
        return dx_NI, dw, *(None,) * 5


def _operands(
    x_NI: Tensor, recipe: Recipe, role: Role, rows: RowRuns, weight: QuantisedOperand, for_dw: bool
) -> QuantisedRows:
    """Return each run's codes along features, and the operand of the weight's gradient."""
    valid = rows.valid_rows(x_NI)
    runs = [valid[start:end] for _, start, end in rows.runs]
    if weight.on_operand is not None:
        for group, run_NI in zip(rows.groups, runs, strict=True):
            weight.on_operand(role, group, run_NI)
    narrow_dw = for_dw and recipe.narrow_dw
    transforms = recipe.kind == "nvfp4"
    form = recipe.format(role)
    block = recipe.hadamard_size
    width = x_NI.shape[1]
    # In chunks of multiple blocks of rows, as casts and random numbers take many bytes per element.
    multiple = lcm(form.columns or 1, block)
    cuts = [row_chunks(run_NI, multiple) or [slice(0)] for run_NI in runs]

    def transformed(run_NI: Tensor) -> Tensor:
        """Return rows, transformed if the format does so, for blocks along rows."""
        return transform(run_NI.mT, block).mT if transforms else run_NI

    def largest(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        pairs = zip(runs, cuts, strict=True)
        amaxes = ([amax_of(change(run_NI[cut])) for cut in run_cuts] for run_NI, run_cuts in pairs)
        return [torch.stack(each).amax(0) for each in amaxes]

    amax: list[Tensor | None] = [None] * (2 * len(runs))
    if recipe.has_matrix_scale and runs:
        # The transform changes the amax; without it both directions have one amax.
        amaxes = largest(lambda run_NI: run_NI)
        amaxes += largest(transformed) if transforms and narrow_dw else []
        groups = rows.groups * (len(amaxes) // len(runs))
        reduced = weight.reduce_amax(_nan_to_inf(torch.stack(amaxes)), role, groups)
        amax = [*reduced, *reduced] if len(amaxes) == len(runs) else [*reduced]

    def encode_runs(dim: int, amaxes: list[Tensor | None]) -> Iterator[Quantised]:
        """Yield the codes of each run, in blocks along features or along rows."""
        for index, (run_NI, run_cuts, run_amax) in enumerate(zip(runs, cuts, amaxes, strict=True)):
            random = None
            codes = list[Quantised]()
            for cut in run_cuts:
                if role == "gradient" and recipe.stochastic_gradients:
                    number = rows.row_numbers(index, x_NI.device)[cut]
                    number = number if dim == -1 else _padded_numbers(number, block)
                    random = weight.seed.draw(number, width, int(dim == -2))
                chunk = run_NI[cut] if dim == -1 else transformed(run_NI[cut])
                codes.append(encode(chunk, form, dim, random, run_amax))
            yield concatenate(codes)

    codes = list(encode_runs(-1, amax[: len(runs)]))
    if not runs or not for_dw:
        return QuantisedRows(codes, None)
    if not narrow_dw:
        return QuantisedRows(codes, SavedOperand((valid,), (), tuple(map(len, runs)), None))
    along_rows = [run_codes.mT for run_codes in encode_runs(-2, amax[len(runs) :])]
    return QuantisedRows(codes, SavedOperand.of(along_rows))


def _nan_to_inf(amax: Tensor) -> Tensor:
    # A maximum over ranks could lose a NaN, but not an Inf.
    return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _padded_numbers(number_N: Tensor, size: int) -> Tensor:
    """Return row numbers, including the padding of the last transform."""
    return (number_N[::size, None] + torch.arange(size, device=number_N.device)).flatten()


def _add_gradients(
    groups: list[int],
    dy: SavedOperand,
    x: SavedOperand,
    into_EOI: Tensor,
    multiply: Callable[[Quantised, Quantised], Tensor],
) -> None:
    """Add each run's contribution to the gradient of its matrix."""
    for group, dy_run, x_run in zip(groups, dy.runs(), x.runs(), strict=True):
        if isinstance(dy_run, Tensor):
            assert isinstance(x_run, Tensor)
            into_EOI[group] += dy_run.mT.to(into_EOI.dtype) @ x_run.to(into_EOI.dtype)
        elif dy_run.shape[-1]:
            assert isinstance(x_run, Quantised)
            into_EOI[group] += multiply(dy_run, x_run.mT)
