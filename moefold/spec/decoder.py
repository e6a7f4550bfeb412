"""Properties of a whole decoder that follow from the descriptions of its layers: parameters, legal
sizes, saved tensors, and the weights that QK-clip scales."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.mesh.shares import divisors
from moefold.model.config import Block, Decoder, LowRank, MultiToken, to_stacks
from moefold.spec.layer import (
    NORMS,
    NOTHING,
    STATISTIC,
    Attention,
    Axis,
    LayerSpec,
    RoutingSpec,
    Saved,
    SavedKind,
    Shape,
    Sublayer,
    Units,
    Weight,
    as_layer_spec,
    norm,
)

READ_BY_NORMS = (SavedKind.BLOCK_INPUT, SavedKind.RESIDUAL)
"""Rows that the norm before a sublayer reads, or its products where it has none."""
MAX_ELEMENTS = 2**45
MAX_TOTAL_EXPERTS = 2**20
"""Bounds of the numbers of one weight, and of the experts of all layers."""
LORA_A = "_lora_a"
LORA_B = "_lora_b"
"""Suffixes of the names of an adapter's A and B, after the name of the adapted weight."""


@dataclass(frozen=True)
class ModelNeeds:
    """Facts about a model that decide which layouts are legal."""

    units: tuple[Units, ...]
    """Distinct units that the axes of a layout must divide."""
    moe_layers: tuple[bool, ...]
    """For each layer, without those of multi-token prediction, whether it has experts."""
    specs: tuple[LayerSpec, ...] = ()
    """Distinct descriptions of layers."""
    has_undescribed: bool = False
    """Whether there are plug-in layers without a description."""
    multi_token: int = 0
    """Number of layers of multi-token prediction."""

    @property
    def modules(self) -> frozenset[str]:
        """Kinds of module that save tensors for backward."""
        shape = Shape(hidden=1, rows=1)
        return frozenset({"block", *(part.module for s in self.specs for part in s.saved(shape))})

    def recomputable(self, tp: int) -> frozenset[str]:
        """Kinds of module whose recompute frees saved tensors, given the size of tp."""
        shape = Shape(hidden=1, rows=1, tp=tp)
        return frozenset(
            kind for s in self.specs for part in s.saved(shape) for kind in part.freed_by
        )

    def legal_sizes(self, axis: Axis) -> list[int] | None:
        """Return the sizes of an axis that its units allow, ascending; None if it has no units."""
        units = [unit for unit in self.units if unit.axis == axis]
        if not units:
            return None
        divided = [unit.number for unit in units if not unit.uneven]
        most = min(unit.number for unit in units)
        candidates = divisors(math.gcd(*divided)) if divided else range(1, most + 1)
        return [size for size in candidates if size <= most]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.moe_layers)

    @property
    def heads(self) -> tuple[int, ...]:
        """Distinct numbers of heads and key-value heads of the layers."""
        return tuple(dict.fromkeys(units.number for units in self.units if units.heads))

    @property
    def experts(self) -> tuple[int, ...]:
        """Distinct numbers of experts of the layers."""
        stated = tuple(units.number for units in self.units if units.axis == "ep")
        return stated if any(self.moe_layers) else ()


def model_needs(decoder: Decoder, seq: int | None = None) -> ModelNeeds:
    """Return the rules of legal layouts for a decoder.

    A sequence of ``seq`` tokens, if known, is cut into ``2 * cp`` pieces, of which a rank takes one
    from either end, so that all have equal work under a causal mask. A plug-in layer without a
    description has no rules.
    """
    units = [vocabulary_units(decoder)]
    if seq is not None:
        rule = f"cp must be 1, or 2 * cp must divide the sequence length ({seq})"
        number = seq // 2 if seq % 2 == 0 else 1
        units.append(Units("cp", number, "tokens", said=rule))
    routed = list[bool]()
    distinct = dict[LayerSpec, None]()
    undescribed = False
    for stack in decoder.stacks:
        for block in stack.blocks:
            specs = [r for r in (block.attention, block.ffn) if isinstance(r, LayerSpec)]
            undescribed |= len(specs) < 2
            for spec in specs:
                units += spec.units(decoder.hidden)
                distinct[spec] = None
        routed += [has_routing(block.ffn) for block in stack.blocks] * stack.repeat
    if not any(routed):
        for axis in ("ep", "etp"):
            units.append(Units(axis, 1, "experts", said=f"{axis} needs layers with experts"))
    moe_layers = tuple(routed[: decoder.layers])
    mtp = len(routed) - decoder.layers
    return ModelNeeds(tuple(dict.fromkeys(units)), moe_layers, tuple(distinct), undescribed, mtp)


def routings(decoder: Decoder) -> list[RoutingSpec]:
    """Return the routing of each layer with experts, in the model's order."""
    specs = [block.ffn for block in decoder.blocks if isinstance(block.ffn, LayerSpec)]
    return [spec.routing for spec in specs if spec.routing is not None]


def has_routing(record: Record) -> bool:
    """Return whether a layer routes rows to experts."""
    return isinstance(record, LayerSpec) and record.routing is not None


def embedding_weight(decoder: Decoder) -> Weight:
    """Return the description of the embedding matrix, which is also the head's if tied."""
    return replace(_vocab_matrix(decoder, "embed.weight"), product=decoder.tied, looked_up=True)


def head_weight(decoder: Decoder) -> Weight:
    """Return the description of the head's matrix of a decoder that is not tied."""
    return _vocab_matrix(decoder, "head.weight")


def final_norm_weight(decoder: Decoder) -> Weight:
    """Return the description of the norm before the head."""
    weight = norm("norm.weight", decoder.hidden, start="norm")
    return replace(weight, frozen=weight.name in decoder.frozen)


def vocabulary_units(decoder: Decoder) -> Units:
    """Return the rows of the embedding and of the head, which tp cuts; it need not divide them."""
    return Units("tp", decoder.vocab, "the vocabulary size", uneven=True)


def _vocab_matrix(decoder: Decoder, name: str) -> Weight:
    cut = ((0, vocabulary_units(decoder)),)
    return Weight(name, (decoder.vocab, decoder.hidden), cut, frozen=name in decoder.frozen)


def model_weights(decoder: Decoder) -> tuple[Weight, ...]:
    """Return descriptions of all parameters of a model, with global names, in the model's order.

    Raises:
        ValueError: if a plug-in layer has no description.
    """
    for block in decoder.blocks:
        for record in (block.attention, block.ffn):
            as_layer_spec(record)
    return tuple(known_weights(decoder))


def require_possible(decoder: Decoder) -> None:
    """Raise ``ValueError`` if a part of a model is larger than anything can hold."""
    experts = 0
    for stack in decoder.stacks:
        for block in stack.blocks:
            routing = as_layer_spec(block.ffn).routing
            experts += stack.repeat * (0 if routing is None else routing.experts)
            for weight in block_weights(block, decoder.hidden, 0):
                if math.prod(weight.shape) > MAX_ELEMENTS:
                    numbers = " x ".join(map(str, weight.shape))
                    raise ValueError(f"a weight has {numbers} numbers; at most 2^45 are possible")
    if experts > MAX_TOTAL_EXPERTS:
        most = f"{MAX_TOTAL_EXPERTS:,}"
        raise ValueError(f"has {experts:,} experts in all layers; at most {most} are possible")


def known_weights(decoder: Decoder) -> Iterator[Weight]:
    """Yield descriptions of a model's parameters, leaving out layers without a description."""
    yield embedding_weight(decoder)
    for number, block in enumerate(decoder.blocks):
        yield from block_weights(block, decoder.hidden, number)
    yield final_norm_weight(decoder)
    if not decoder.tied:
        yield from with_adapters((head_weight(decoder),), decoder.adapters)


def sublayers(block: Block) -> Iterator[tuple[str, LayerSpec]]:
    """Yield the sublayers that a block has, each with its name, ``attention`` or ``ffn``.

    Raises:
        ValueError: if a plug-in layer has no description.
    """
    for name, record in (("attention", block.attention), ("ffn", block.ffn)):
        spec = as_layer_spec(record)
        if not spec.absent:
            yield name, spec


def block_weights(block: Block, hidden: int, layer: int) -> Iterator[Weight]:
    """Yield descriptions of the parameters of one block, the norms of a sublayer first.

    Absent sublayers and those without a description have none. A multi-token prediction block has
    also the matrix that joins its inputs (arXiv 2412.19437, section 2.2), not cut by tp, and norms.
    """
    weights = list[Weight]()
    for name, spec in (("attention", block.attention), ("ffn", block.ffn)):
        if isinstance(spec, LayerSpec) and not spec.absent:
            norms = norm_names(block, name)
            prefix = spec.prefix or name
            weights += (norm(f"{norm_name}.weight", hidden, start="norm") for norm_name in norms)
            weights += (replace(w, name=f"{prefix}.{w.name}") for w in spec.weights(hidden))
    if block.multi_token is not None:
        weights += (norm(f"{rows}_norm.weight", hidden, start="norm") for rows in ("embed", "row"))
        weights.append(Weight("join.weight", (hidden, 2 * hidden), category="multi_token"))
        weights.append(norm("norm.weight", hidden, start="norm"))
    for weight in with_adapters(weights, block.adapters):
        name = f"layers.{layer}.{weight.name}"
        yield replace(weight, name=name, frozen=weight.name in block.frozen)


def parts_below_trained(decoder: Decoder) -> int:
    """Return the number of a decoder's first parts without a trained parameter.

    Parts are the embedding, each layer, and all that follows the layers: 0 means that the embedding
    is trained, 1 that the first layer is.
    """
    table = embedding_weight(decoder)
    if not table.frozen or any(adapter.weight == table.name for adapter in decoder.adapters):
        return 0
    for number, block in enumerate(decoder.blocks[: decoder.layers]):
        weights = block_weights(block, decoder.hidden, number)
        if not all(weight.frozen for weight in weights):
            return number + 1
    return decoder.layers + 1


def norm_names(block: Block, sublayer: str) -> tuple[str, ...]:
    """Return the names of the norms of sublayer ``attention`` or ``ffn``."""
    names = f"{sublayer}_norm", f"{sublayer}_out_norm"
    return tuple(compress(names, block.norm_positions(sublayer)))


def _sublayer_saved(name: Sublayer, record: Record, shape: Shape) -> Iterator[Saved]:
    """Yield what a sublayer states, with names of weights relative to the block."""
    spec = as_layer_spec(record)
    prefix = f"{spec.prefix or name}."
    for part in spec.saved(shape):
        operand_of = tuple(prefix + weight for weight in part.operand_of)
        result_of = part.result_of and prefix + part.result_of
        part = replace(part, sublayer=name, operand_of=operand_of, result_of=result_of)
        if part.also_saved is not None:
            part = replace(part, also_saved=replace(part.also_saved, sublayer=name))
        yield part


def block_saved(block: Block, shape: Shape) -> Iterator[Saved]:
    """Yield what a block saves for backward: its input and what its sublayers state.

    Layers state what sublayers save after a norm. Without a norm, products read the saved residual
    rows; sublayers that share a norm save its output once; norms after one save their input.
    """
    if block.multi_token is not None:  # schedules never split such a block
        shape = shape._replace(separate_exchanges=False)
    start = Saved("input", shape.hidden_bytes, kind=SavedKind.BLOCK_INPUT, sublayer="attention")
    parts = {
        "attention": [start, *_sublayer_saved("attention", block.attention, shape)],
        "ffn": list(_sublayer_saved("ffn", block.ffn, shape)),
    }
    outputs = {
        part.sublayer: part for part in chain(*parts.values()) if part.kind is SavedKind.NORM_OUTPUT
    }
    shared = block.shares_norm and outputs.get("ffn")
    for name, (before, after) in ((name, block.norm_positions(name)) for name in parts):
        output = outputs.get(name)
        for part in parts[name]:
            if not before and part.kind in (SavedKind.NORM_STATISTIC, SavedKind.NORM_OUTPUT):
                continue
            if shared and part.kind is SavedKind.RESIDUAL:
                continue
            if shared and part is output:
                kinds = part.needed_by
                others = shared.needed_by
                kinds = kinds | others if kinds and others else NOTHING
                names = part.operand_of + shared.operand_of
                part = replace(
                    part, needed_by=kinds, operand_of=names, also_saved=shared.also_saved
                )
            elif not before and part.kind in READ_BY_NORMS and output:
                part = replace(part, operand_of=output.operand_of, also_saved=part)
            yield part
        if after:
            yield Saved(f"{name}_out_norm.input", shape.hidden_bytes)
            statistic = shape.rows * STATISTIC
            yield Saved(f"{name}_out_norm.statistic", statistic, module="norms")
    if block.multi_token is None:
        return
    # Residual rows are saved by the last norm, which reads them too.
    if block.multi_token.reads == "normed":
        yield Saved("rows", shape.hidden_bytes, NORMS, saved=False)
    yield Saved("embedded", shape.hidden_bytes)
    yield Saved("joined", 2 * shape.hidden_bytes, operand_of=("join.weight",))
    yield Saved("norm.input", shape.hidden_bytes)
    yield Saved("norms.statistics", 3 * shape.rows * STATISTIC, module="norms")


def with_adapters(weights: Iterable[Weight], adapters: Sequence[LowRank]) -> Iterator[Weight]:
    """Yield weights, each followed by A and B of its adapter, if it has one."""
    ranks = {adapter.weight: adapter.rank for adapter in adapters}
    for weight in weights:
        yield weight
        if weight.name in ranks:
            yield from adapter_weights(weight, ranks[weight.name])


def adapter_weights(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Return A ``[..., rank, in]`` and B ``[..., out, rank]`` for a weight ``[..., out, in]``.

    An axis that cuts the inputs cuts A, one that cuts the outputs cuts B, and each expert has its
    own. As products are linear, ranks need no communication for them: the one that is whole has a
    partial gradient on each rank. Gate and up of an expert share A, as in PEFT; those of other
    feed-forwards have one each. A starts with PEFT's std and B at zero, so that an adapter
    initially adds nothing.
    """
    lead = weight.shape[: 1 if weight.is_expert else -2]
    last = len(weight.shape) - 1
    cuts_a: list[tuple[int, Units]] = []
    for dim, units in weight.cuts:
        if dim == last:
            cuts_a.append((len(lead) + 1, units))
        elif dim < len(lead):
            cuts_a.append((dim, units))
    cuts_b = tuple((dim, units) for dim, units in weight.cuts if dim != last)
    shape_a = (*lead, rank, weight.shape[-1])
    shape_b = (*weight.shape[:-1], rank)
    common: dict[str, Any] = {"category": "adapters", "product": weight.product}
    std = (3 * shape_a[-1]) ** -0.5
    a = Weight(weight.name + LORA_A, shape_a, tuple(cuts_a), start=std, **common)
    b = Weight(weight.name + LORA_B, shape_b, cuts_b, start="zeros", **common)
    return a, b


def heads_by_weight(decoder: Decoder) -> dict[str, int]:
    """Return the number of heads of each weight that tp cuts along dim 0 by heads."""
    cuts = ((weight.name, *cut) for weight in known_weights(decoder) for cut in weight.cuts)
    return {name: units.number for name, dim, units in cuts if dim == 0 and units.heads}


def qk_clip_violations(decoder: Decoder, qk_clip: Record) -> Iterator[Violation]:
    """Yield why QK-clip cannot bound a decoder's logits: norms, or unknown or frozen weights."""
    for number, block in enumerate(decoder.blocks):
        spec = block.attention
        if not isinstance(spec, LayerSpec):
            continue
        operations = spec.operations(decoder.hidden)
        cores = [op.core for op in operations if isinstance(op.core, Attention)]
        if not cores:
            continue
        names = [f"attention.{rows.weight}" for rows in spec.logits]
        adapted = {adapter.weight for adapter in block.adapters}
        if not names and any(core.head_norms for core in cores):
            rule = f"must be off: layer {number} normalises queries and keys, which undoes clipping"
        elif not names:
            rule = f"must be off: {type(spec).__name__} of layer {number} states no logits, which "
            rule += "name the query and key weights to scale"
        elif any(name in block.frozen or name in adapted for name in names):
            rule = f"must be off: query or key weights of layer {number} are not trained"
        else:
            continue
        yield Violation(("qk_clip",), qk_clip, rule, None)
        return


def with_multi_token(decoder: Decoder, losses: Sequence[MultiToken]) -> Decoder:
    """Return a decoder with a copy of its last layer appended for each multi-token loss."""
    main = decoder.blocks[: decoder.layers]
    added = (main[-1].model_copy(update={"multi_token": loss}) for loss in losses)
    return decoder.model_copy(update={"stacks": to_stacks((*main, *added))})
