"""Exact counts of a described decoder: parameters, active parameters, FLOPs. No torch.

They follow from the layers' descriptions (``moefold/spec/layer.py``).
FLOPs count a multiply-add as 2, forward and backward as 3 forwards (2 for frozen weights), no
recompute, and leave out
norms, embedding look-up, router and the gate of a shared expert (the convention of Megatron-LM's
published figures).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from moefold.model.config import Block, Decoder
from moefold.spec.decoder import (
    LORA_A,
    LORA_B,
    block_weights,
    embedding,
    halves,
    head,
    with_adapters,
)
from moefold.spec.layer import Attention, Scan, described


@dataclass(frozen=True)
class PartCounts:
    """Counts of one part of a layer."""

    parameters: int = 0
    """All parameters."""
    idle: int = 0
    """Of those, the ones a token does not pass through."""
    multiplied: int = 0
    """Of the others, those that enter a matrix product counted in FLOPs."""
    frozen: int = 0
    """Of those, the ones without a gradient: backward has one product of them and not two."""

    def __add__(self, other: "PartCounts") -> "PartCounts":
        return PartCounts(*map(add, vars(self).values(), vars(other).values()))

    def times(self, number: int) -> "PartCounts":
        """Return the counts of so many equal parts."""
        return PartCounts(*(value * number for value in vars(self).values()))


@dataclass(frozen=True)
class Counts:
    """Counts of a whole decoder."""

    parts: Mapping[str, PartCounts] = field(default_factory=dict)
    """By kind of part: embedding, attention, norms, ffn, experts, router, shared, head, and
    adapters."""
    cores: Sequence[tuple[Attention | Scan, int]] = ()
    """Attention and scans over the sequence, and how many layers have each."""

    @property
    def total(self) -> PartCounts:
        """The sum over parts."""
        return sum(self.parts.values(), PartCounts())

    @property
    def parameters(self) -> int:
        """All parameters; buffers are not in it."""
        return self.total.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters a token passes through, embedding and head included."""
        return self.total.parameters - self.total.idle

    def flops(self, lengths: Sequence[int], causal: bool = True) -> int:
        """Return forward and backward FLOPs of sequences that attend within themselves.

        Args:
            lengths: tokens of each sequence.
            causal: whether attention counts the half that the mask leaves, or all of it.
        """
        found = (6 * self.total.multiplied - 2 * self.total.frozen) * sum(lengths)
        for core, layers in self.cores:
            if isinstance(core, Scan):
                found += round(6 * layers * core.products * sum(lengths))
                continue
            for length in lengths:
                # Twice the pairs of a sequence: they are whole numbers.
                seen = round(2 * length * core.pairs(length)) if causal else 2 * length**2
                found += 3 * layers * core.query_width * seen
        return found

    def flops_per_token(self, seq: int, causal: bool = True) -> float:
        """Return the FLOPs of one sequence of ``seq`` tokens, see :meth:`flops`, per token."""
        return self.flops([seq], causal) / seq


def count(decoder: Decoder) -> Counts:
    """Count a decoder's parts.

    A block of a further token, with all that it has, is a part of its own: it reads the model's
    own embedding and head once more, and its three norms count as one product each.
    """
    hidden, matrix = decoder.hidden, decoder.vocab * decoder.hidden
    parts = {"embedding": PartCounts(matrix), "norms": PartCounts(hidden)}
    fixed = (embedding(decoder) if decoder.tied else head(decoder)).frozen
    parts["head"] = PartCounts(0 if decoder.tied else matrix, 0, matrix, matrix * fixed)
    of_head = sum(w.elements for w in with_adapters((head(decoder),), decoder.adapters)) - matrix
    if of_head:
        parts["adapters"] = PartCounts(of_head, 0, of_head)
    cores = Counter[Attention | Scan]()
    blocks = [(block, stack.repeat) for stack in decoder.stacks for block in stack.blocks]
    for block, repeat in blocks:
        found = _block(block, hidden)
        if block.multi_token is not None:
            read = PartCounts(0, 0, matrix, matrix * fixed)
            found = {"multi_token": sum(found.values(), read)}
        for name, part in found.items():
            parts[name] = parts.get(name, PartCounts()) + part.times(repeat)
        for _, spec in halves(block):
            for one in spec.operations(hidden):
                if one.core is not None:
                    cores[one.core] += repeat
    return Counts(parts, tuple(cores.items()))


def _block(block: Block, hidden: int) -> dict[str, PartCounts]:
    """Count a block by what its weights are counted under."""
    found, routing = dict[str, PartCounts](), described(block.ffn).routing
    names = [f"layers.0.{one}.weight" for one in ("embed_norm", "row_norm", "join", "norm")]
    for name, spec in halves(block):
        read = (w for one, _, ws in spec.products(hidden) if not one.wide for w in ws)
        names += (f"layers.0.{spec.prefix or name}.{weight.name}" for weight in read)
    multiplied = {name + end for name in names for end in ("", LORA_A, LORA_B)}
    for weight in block_weights(block, hidden, 0):
        size = used = weight.elements
        if weight.expert and routing is not None:
            used = size // routing.experts * min(routing.top_k, routing.experts)
        # The convention takes the norm of a latent, alone among norms, for one product.
        counted = used if weight.name in multiplied or weight.latent else 0
        part = PartCounts(size, size - used, counted, counted * weight.frozen)
        found[weight.counted] = found.get(weight.counted, PartCounts()) + part
    return found
