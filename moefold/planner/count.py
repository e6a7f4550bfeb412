"""Exact counts of a described decoder: parameters, active parameters, FLOPs. No torch.

They follow from the layers' descriptions (``moefold/spec/layer.py``). FLOPs count a multiply-add as
2, forward and backward as 3 forwards (2 for frozen weights, 1 in layers without a backward), no
recompute, and exclude norms, embedding look-up, router and the gate of a shared expert (the
convention of Megatron-LM's published figures).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import add

from moefold.model.config import Block, Decoder
from moefold.spec.decoder import (
    LORA_A,
    LORA_B,
    block_weights,
    embedding_weight,
    head_weight,
    sublayers,
    with_adapters,
)
from moefold.spec.forward_only import mark_forward_only, num_passes
from moefold.spec.layer import Attention, Scan, as_layer_spec


@dataclass(frozen=True)
class PartCounts:
    """Parameter counts of one part of a model."""

    parameters: int = 0
    """All parameters."""
    inactive: int = 0
    """Parameters that a token does not use: those of experts that are not chosen."""
    multiplied: int = 0
    """Used parameters in matrix products that count as FLOPs."""
    frozen: int = 0
    """``multiplied`` parameters without a gradient: backward has one product, not two."""
    forward_only: int = 0
    """``frozen`` parameters of layers without a backward."""

    def __add__(self, other: "PartCounts") -> "PartCounts":
        return PartCounts(*map(add, vars(self).values(), vars(other).values()))

    def times(self, number: int) -> "PartCounts":
        """Return the counts of ``number`` equal parts."""
        return PartCounts(*(value * number for value in vars(self).values()))


@dataclass(frozen=True)
class Counts:
    """Counts of a whole decoder."""

    parts: Mapping[str, PartCounts] = field(default_factory=dict)
    """Counts by kind of part: embedding, attention, norms, ffn, experts, router, shared, head,
    adapters, multi_token."""
    cores: Sequence[tuple[Attention | Scan, int]] = ()
    """Attention and scans over the sequence, with the number of layers that have each."""
    forward_cores: Sequence[tuple[Attention | Scan, int]] = ()
    """Those of layers without a backward, which are in ``cores`` too."""

    @property
    def total(self) -> PartCounts:
        """The sum over parts."""
        return sum(self.parts.values(), PartCounts())

    @property
    def parameters(self) -> int:
        """Number of all parameters, without buffers."""
        return self.total.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses, embedding and head included."""
        return self.total.parameters - self.total.inactive

    def flops(self, lengths: Sequence[int], causal: bool = True) -> int:
        """Return forward and backward FLOPs of sequences that do not attend to each other.

        Args:
            lengths: tokens of each sequence.
            causal: whether only unmasked pairs of attention count, or all pairs.
        """
        parts = self.total
        elements = 6 * parts.multiplied - 2 * parts.frozen - 2 * parts.forward_only
        total = elements * sum(lengths) + _core_flops(self.cores, lengths, causal, 3)
        return total - _core_flops(self.forward_cores, lengths, causal, 2)

    def flops_per_token(self, seq: int, causal: bool = True) -> float:
        """Return the FLOPs per token of one sequence of ``seq`` tokens (:meth:`flops`)."""
        return self.flops([seq], causal) / seq


def _core_flops(
    cores: Sequence[tuple[Attention | Scan, int]],
    lengths: Sequence[int],
    causal: bool,
    forwards: int,
) -> int:
    """Return the FLOPs of a number of forwards of attention and scans over sequences."""
    total = 0
    for core, layers in cores:
        if isinstance(core, Scan):
            total += round(2 * forwards * layers * core.products * sum(lengths))
            continue
        for length in lengths:
            # Twice the pairs of a sequence, which is a whole number.
            twice_pairs = round(2 * length * core.pairs(length)) if causal else 2 * length**2
            total += forwards * layers * core.query_width * twice_pairs
    return total


def count(decoder: Decoder) -> Counts:
    """Count the parts of a decoder.

    Each multi-token prediction block is counted as a whole under ``multi_token``: it reads the
    model's embedding and head once more, and its three norms count as one product each.
    """
    hidden = decoder.hidden
    matrix = decoder.vocab * decoder.hidden
    parts = {"embedding": PartCounts(matrix), "norms": PartCounts(hidden)}
    fixed = (embedding_weight(decoder) if decoder.tied else head_weight(decoder)).frozen
    parts["head"] = PartCounts(0 if decoder.tied else matrix, 0, matrix, matrix * fixed)
    head_weights = with_adapters((head_weight(decoder),), decoder.adapters)
    head_adapters = sum(weight.elements for weight in head_weights) - matrix
    if head_adapters:
        parts["adapters"] = PartCounts(head_adapters, 0, head_adapters)
    cores = Counter[Attention | Scan]()
    forward_cores = Counter[Attention | Scan]()
    for block, same in groupby(mark_forward_only(decoder.blocks, decoder)):
        repeat = len(list(same))
        counts = _block_counts(block, hidden)
        if block.multi_token is not None:
            read = PartCounts(0, 0, matrix, matrix * fixed)
            counts = {"multi_token": sum(counts.values(), read)}
        for name, part in counts.items():
            parts[name] = parts.get(name, PartCounts()) + part.times(repeat)
        for _, spec in sublayers(block):
            for operation in spec.operations(hidden):
                if operation.core is not None:
                    cores[operation.core] += repeat
                    forward_cores[operation.core] += repeat * (num_passes(block) == 1)
    return Counts(parts, tuple(cores.items()), tuple(forward_cores.items()))


def _block_counts(block: Block, hidden: int) -> dict[str, PartCounts]:
    """Count a block by kind of part (``Weight.category``)."""
    counts = dict[str, PartCounts]()
    routing = as_layer_spec(block.ffn).routing
    names = [f"layers.0.{norm}.weight" for norm in ("embed_norm", "row_norm", "join", "norm")]
    for name, spec in sublayers(block):
        read = (w for op, _, ws in spec.products(hidden) if not op.wide for w in ws)
        names += (f"layers.0.{spec.prefix or name}.{weight.name}" for weight in read)
    multiplied = {name + end for name in names for end in ("", LORA_A, LORA_B)}
    for weight in block_weights(block, hidden, 0):
        size = used = weight.elements
        if weight.is_expert and routing is not None:
            used = size // routing.experts * min(routing.top_k, routing.experts)
        # The convention counts the norm of a latent, unlike other norms, as a product.
        counted = used if weight.name in multiplied or weight.latent else 0
        fixed = counted * weight.frozen
        part = PartCounts(size, size - used, counted, fixed, fixed * (num_passes(block) == 1))
        counts[weight.category] = counts.get(weight.category, PartCounts()) + part
    return counts
