"""Number formats of products, and compute copies of weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moefold.kernels.operand import Operand
from moefold.kernels.quantise.blocks import Role
from moefold.kernels.quantise.config import Fp8Tensor, Quantise
from moefold.kernels.scaled.products import (
    QuantisedOperand,
    QuantisedWeight,
    Recipe,
    ReduceAmax,
    RoundingSeed,
)
from moefold.layers.config import Precision
from moefold.layers.history import AmaxHistory
from moefold.layers.placement import Shard
from moefold.model.config import Decoder
from moefold.optim.norm import non_finite
from moefold.spec.decoder import model_weights
from moefold.spec.quantised import quantised_weight_names

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Narrow(NamedTuple):
    """How products of a weight are quantised, and which part of the weight is on this rank."""

    recipe: Recipe
    number: int
    """Number of the weight in the model, for stochastic rounding."""
    by_rank: bool = False
    """Whether blocks and scales of rows are separate on each rank."""
    inputs: str = ""
    """Axis that cuts the inputs."""
    outputs: str = ""
    """Axis that cuts the outputs."""
    columns: tuple[range, ...] = ()
    """Outputs on this rank; empty for all."""
    first_expert: int | None = None
    """Number of the first expert on this rank; None for weights without experts."""
    history: AmaxHistory | None = None
    """Amax history, for delayed scaling."""

    @property
    def version(self) -> int:
        """A number that changes whenever the scales of delayed scaling do."""
        return 0 if self.history is None else self.history.past_RMH._version

    def delayed(self, amax: Tensor, role: Role, matrices: Sequence[int], record: bool) -> Tensor:
        """Return the amax that scales local matrices (:meth:`AmaxHistory.scaling_amax`)."""
        assert self.history is not None
        matrices = [(self.first_expert or 0) + matrix for matrix in matrices]
        return self.history.scaling_amax(amax, role, matrices, record)

    def for_shard(self, shard: Shard) -> "Narrow":
        """Return the record for this rank's shard of the weight."""
        cuts = {dim: axis for axis, dim in shard.placement.cuts.items()}
        lead = int(shard.placement.is_expert)
        last = len(shard.shape) - 1
        (start, end) = shard.box[last - 1]
        width = shard.shape[last - 1]
        outer = range(*shard.box[lead]) if last - lead > 1 else range(1)
        return self._replace(
            inputs=cuts.get(last, ""),
            outputs="".join(cuts.get(dim, "") for dim in range(lead, last)),
            columns=tuple(range(index * width + start, index * width + end) for index in outer),
            first_expert=shard.box[0][0] if lead else None,
        )

    def scale_axes(self, role: Role, own: bool) -> tuple[str, ...]:
        """Return the axes whose ranks hold parts of a matrix with one scale.

        ``own``: whether each tensor rank reads its own rows.
        """
        if role == "weight":
            cut = self.inputs + self.outputs  # no weight has both
        elif self.by_rank:
            cut = ""
        else:
            cut = self.inputs if role == "rows" else self.outputs
            if self.first_expert is None:
                return ("tp", "cp") if own or cut else ("cp",)
        return (cut,) if cut else ()


class WeightProducts(nn.Module):
    """Base of modules whose products with their weights can be quantised."""

    narrow: Mapping[str, Narrow] = {}
    """Quantised weights, by name in the module."""


class ExactBuffers(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast.

    In bfloat16 counts could not distinguish 40,841 from 40,840, nor a selection bias move by 1e-3.
    Buffers change device as usual; those of submodules are not covered.
    """

    def _apply(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                # Copied from the old values, because the cast has lost digits.
                self._buffers[name] = old.to(new.device)
        return self


def quantise_products(model: nn.Module, decoder: Decoder) -> None:
    """Quantise the products of a model as its description states.

    Raises:
        ValueError: if a plug-in layer with a quantised weight is no :class:`WeightProducts`.
    """
    record = decoder.quantise
    if not isinstance(record, Quantise):
        return
    recipe = recipe_of(record)
    experts = {weight.name for weight in model_weights(decoder) if weight.is_expert}
    for name, number in quantised_weight_names(decoder).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if not isinstance(owner, WeightProducts):
            raise ValueError(
                f"{name}: train.quantise needs a layer that multiplies by Linear or SwiGlu; "
                f"exclude the weight with train.quantise.keep=[{name}]"
            )
        narrow = Narrow(recipe, number, not record.scales_per_run)
        if isinstance(record, Fp8Tensor) and record.scaling == "delayed":
            parameter = owner.get_parameter(leaf)
            matrices = parameter.shape[0] if name in experts else 1
            latest = record.amax != "max"
            history = AmaxHistory(matrices, record.history, latest, parameter.device)
            owner.add_module(f"{leaf}_history", history)
            narrow = narrow._replace(history=history)
        owner.narrow = {**owner.narrow, leaf: narrow}


def recipe_of(record: Quantise) -> Recipe:
    """Return the recipe of quantised products for a record."""
    wire = record.wire == "codes"
    narrow_dw = record.wgrad == "narrow"
    rest = record.block, wire, record.hidden_block, record.backend
    return Recipe(record.kind, record.scale_rule, narrow_dw, *rest)


def quantised_weights(model: nn.Module) -> dict[str, Narrow]:
    """Return the quantised weights of a model, by global name."""
    return {
        f"{path}.{leaf}": narrow
        for path, module in model.named_modules()
        if isinstance(module, WeightProducts)
        for leaf, narrow in module.narrow.items()
    }


class PrecisionPolicy:
    """Turns parameters into operands of products.

    Parameters stay in the master dtype (fp32, or fp64 for proofs). Under ``bf16`` each weight is
    cast once per update, for any number of micro-batches, forward passes and recomputes.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision: Precision = precision
        self.dtype = DTYPES[precision]
        self.master_dtype = torch.promote_types(self.dtype, torch.float32)
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._sharded_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._codes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.in_place_copies = False
        """Whether copies are refreshed in place, because captured graphs read them."""
        self.seed = 0
        self.step = 0
        """Key of random numbers: stochastic rounding, dropout and routing."""
        self.adapts = True
        """Whether adapters are applied to weights."""
        self.non_finite_operands: list[tuple[int, str, int | None]] | None = None
        """Non-finite operands of quantised products in order of execution, as (number of weight,
        role, expert); None unless a fault is being traced."""

    def set_value(self, weight: Tensor, value: Tensor | Callable[[], QuantisedWeight]) -> None:
        """Use ``value``, or the codes it returns, for the sharded parameter ``weight``.

        The caller keeps the value current, and may free its memory between uses.
        """
        self._sharded_values[weight] = value

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """While open, adapters are not applied."""
        self.adapts = False
        try:
            yield
        finally:
            self.adapts = True

    @property
    def copies(self) -> list[Tensor]:
        """The existing compute copies."""
        return [copy for _, _, copy in self._copies.values()]

    @property
    def codes(self) -> list[Tensor]:
        """Codes and scales of local weights, and their amax under delayed scaling."""
        weights = [weight for *_, weight in self._codes.values()]
        tensors = [weight.amax for weight in weights]
        for operand in (operand for weight in weights for operand in weight.operands):
            tensors += [operand.codes, operand.scales, operand.matrix_scale]
        return [tensor for tensor in tensors if tensor is not None]

    def operand(self, weight: Tensor, dtype: torch.dtype | None = None) -> Operand:
        """Return the weight as an operand in the compute dtype, or in ``dtype``.

        The copy is refreshed when the parameter's version counter has changed (as by any in-place
        update, of an optimizer or a checkpoint) or its memory has. Writing through ``weight.data``
        changes neither: update under ``torch.no_grad()`` instead.
        """
        dtype = dtype or self.dtype
        if self._sharded_values and (value := self._sharded_values.get(weight)) is not None:
            if not isinstance(value, Tensor):
                return Operand(weight, value().dequantise(dtype).view(weight.shape))
            return Operand(weight, _in_dtype(value, weight.dtype, dtype))
        if weight.dtype == dtype:
            return Operand(weight, weight.detach())
        entry = self._copies.get(weight)
        if entry is None or entry[2].dtype != dtype or not _is_current(weight, *entry[:2]):
            values = weight.detach()
            if entry is not None and entry[2].dtype == dtype and self.in_place_copies:
                copy = entry[2].copy_(values)
            else:
                copy = values.to(dtype)
            entry = self._copies[weight] = (weight._version, values, copy)
        return Operand(weight, entry[2])

    def free_copies(self) -> None:
        """Free compute copies and codes, which the next use makes anew."""
        self._copies.clear()
        self._codes.clear()

    def refresh_copies(self) -> None:
        """Update the compute copies now instead of on their next use."""
        for weight, (_, _, copy) in list(self._copies.items()):
            self.operand(weight, copy.dtype)

    def narrow_operand(
        self, weight: Tensor, narrow: Narrow, largest: ReduceAmax, groups: int = 0
    ) -> QuantisedOperand:
        """Return the weight as the operand of a quantised product.

        The values that a wide product would read are quantised: once per update if the weight is
        local, and in each pass if it is gathered from other ranks.

        Args:
            weight: the parameter.
            narrow: recipe and shard of the weight.
            largest: computes the maximum over ranks that hold parts of the same matrices.
            groups: number of leading dims that index matrices; the next dims are outputs.
        """

        def narrowed(value: Tensor) -> QuantisedWeight:
            new = QuantisedWeight.of(value.flatten(groups, -2), narrow.recipe, largest)
            return new if narrow.history is not None else replace(new, amax=None)

        def cached() -> QuantisedWeight:
            if (value := self._sharded_values.get(weight)) is not None:
                if not isinstance(value, Tensor):
                    return value()
                return narrowed(_in_dtype(value, weight.dtype, self.dtype))
            entry = self._codes.get(weight)
            if entry is None or entry[0] != narrow.version or not _is_current(weight, *entry[1:3]):
                new = narrowed(weight.detach().to(self.dtype))
                entry = narrow.version, weight._version, weight.detach(), new
                self._codes[weight] = entry
            return entry[3]

        def codes() -> QuantisedWeight:
            # Codes are computed once per update; their amax counts in each step that reads them.
            quantised = cached()
            if narrow.history is not None and quantised.amax is not None:
                narrow.delayed(quantised.amax, "weight", range(quantised.amax.numel()), True)
            return quantised

        on_operand = None if self.non_finite_operands is None else partial(self._note, narrow)
        if on_operand is not None:
            sharded = self._sharded_values.get(weight)
            value = weight.detach() if sharded is None else sharded
            if not isinstance(value, Tensor):
                value = value().dequantise(self.dtype)
            for group, matrix in enumerate(value if groups else value[None]):
                on_operand("weight", group, matrix)
        draw = RoundingSeed((self.seed, narrow.number), self.step, narrow.columns)
        return QuantisedOperand(weight, codes, draw, largest, on_operand)

    def _note(self, narrow: Narrow, role: str, group: int, values: Tensor) -> None:
        """Record an operand if it is not finite."""
        assert self.non_finite_operands is not None
        if non_finite({role: values}):
            first = narrow.first_expert
            self.non_finite_operands.append(
                (narrow.number, role, None if first is None else first + group)
            )


def _is_current(weight: Tensor, version: int, values: Tensor) -> bool:
    """Return whether a parameter still has the version and memory that a copy was made of."""
    return version == weight._version and weight.is_set_to(values)


def _in_dtype(value: Tensor, master: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return a gathered value in the dtype that a layer requests."""
    assert value.untyped_storage().size(), "a weight is read outside of its unit's pass"
    assert dtype == value.dtype or value.dtype == master, (
        f"a layer reads a weight in {dtype} that was gathered in {value.dtype}: its description "
        "must state how it is read (product, looked_up)"
    )
    return value.detach().to(dtype)
