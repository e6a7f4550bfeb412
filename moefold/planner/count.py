"""Exact counts of a described decoder: parameters, active parameters, FLOPs. No torch.

They follow from the layers' descriptions (``moefold/spec/layer.py``).
FLOPs count a multiply-add as 2, forward and backward as 3 forwards, no recompute, and leave out
norms, embedding look-up, router and the gate of a shared expert (the convention of Megatron-LM's
published figures).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moefold.model.config import Block, Decoder, Stack
from moefold.spec.decoder import halves
from moefold.spec.layer import Attention, LayerSpec


@dataclass(frozen=True)
class Part:
    """Counts of one part of a layer."""

    parameters: int = 0
    """All parameters."""
    idle: int = 0
    """Of those, the ones a token does not pass through."""
    multiplied: int = 0
    """Of the others, those that enter a matrix product counted in FLOPs."""
    attended: int = 0
    """Multiply-adds per token and per token it attends to, where it attends to all before it."""
    experts: int = 0
    """Of the parameters, those of routed experts."""

    def __add__(self, other: "Part") -> "Part":
        mine, theirs = vars(self), vars(other)
        return Part(**{name: mine[name] + theirs[name] for name in mine})

    def times(self, number: int) -> "Part":
        """Return the counts of so many equal parts."""
        return Part(**{name: value * number for name, value in vars(self).items()})


@dataclass(frozen=True)
class Counts:
    """Counts of a whole decoder."""

    parts: Mapping[str, Part] = field(default_factory=dict)
    """By kind of part: embedding, attention, norms, ffn, experts, router, shared, head."""
    windows: Sequence[tuple[Attention, int]] = ()
    """Attention within windows, and how many layers have it."""

    @property
    def total(self) -> Part:
        """The sum over parts."""
        return sum(self.parts.values(), Part())

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
        total = self.total
        products = total.multiplied * sum(lengths)
        pairs = total.attended * sum(length**2 for length in lengths)
        seen = sum(
            layers * core.query_width * length * (core.pairs(length) if causal else length)
            for core, layers in self.windows
            for length in lengths
        )
        return 6 * products + (3 if causal else 6) * pairs + round(6 * seen)

    def flops_per_token(self, seq: int, causal: bool = True) -> float:
        """Return the FLOPs of one sequence of ``seq`` tokens, see :meth:`flops`, per token."""
        return self.flops([seq], causal) / seq


def count(decoder: Decoder, multi_token: int = 0) -> Counts:
    """Count a decoder's parts.

    Args:
        decoder: the description.
        multi_token: layers of multi-token prediction, each a block like the last with a matrix
            that joins two rows, three norms, and the model's own embedding and head once more
            (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    matrix = decoder.vocab * decoder.hidden
    parts = {"embedding": Part(parameters=matrix), "norms": Part(parameters=decoder.hidden)}
    parts["head"] = Part(parameters=0 if decoder.tied else matrix, multiplied=matrix)
    for stack in decoder.stacks:
        for block in stack.blocks:
            norms = decoder.hidden * len(list(halves(block)))
            found = {"norms": Part(parameters=norms)}
            for _, spec in halves(block):
                for name, part in _layer(spec, decoder.hidden).items():
                    found[name] = found.get(name, Part()) + part
            for name, part in found.items():
                parts[name] = parts.get(name, Part()) + part.times(stack.repeat)
    if multi_token:
        parts["multi_token"] = _multi_token(decoder).times(multi_token)
    layers = [(block, stack.repeat) for stack in decoder.stacks for block in stack.blocks]
    layers.append((decoder.blocks[-1], multi_token))
    windows = tuple((core, n) for block, n in layers if n for core in _windows(block, decoder))
    return Counts(parts, windows)


def _windows(block: Block, decoder: Decoder) -> Iterator[Attention]:
    """Yield a block's attention where it sees a window of what is before it."""
    for _, spec in halves(block):
        for one in spec.operations(decoder.hidden):
            if isinstance(one.core, Attention) and one.core.window is not None:
                yield one.core


def _multi_token(decoder: Decoder) -> Part:
    """Count what one layer of multi-token prediction adds; its norms count as one product each."""
    last = decoder.stacks[-1].blocks[-1]
    block = Decoder(vocab=2, hidden=decoder.hidden, stacks=(Stack(blocks=(last,)),))
    alone = count(block).parts
    joined = _matrices(2 * decoder.hidden**2 + 3 * decoder.hidden)
    head = Part(multiplied=decoder.vocab * decoder.hidden)
    layer = sum((p for name, p in alone.items() if name not in ("embedding", "head")), Part())
    # The block's own last norm stands among the three.
    return layer + joined + head + Part(parameters=-decoder.hidden)


def _layer(spec: LayerSpec, hidden: int) -> dict[str, Part]:
    """Count one half of a block by what its weights are counted under."""
    operations = [one for one in spec.operations(hidden) if not one.wide]
    multiplied = {name for one in operations for m in one.matmuls for name in m.weights}
    routing, found = spec.routing, dict[str, Part]()
    for weight in spec.weights(hidden):
        size = used = weight.elements
        if weight.expert and routing is not None:
            used = size // routing.experts * routing.top_k
        # The convention takes the norm of a latent, alone among norms, for one product.
        counted = weight.name in multiplied or weight.latent
        part = Part(size, size - used, used if counted else 0, 0, size if weight.expert else 0)
        found[weight.counted] = found.get(weight.counted, Part()) + part
    for one in operations:
        if isinstance(one.core, Attention) and one.core.window is None:
            part = Part(attended=one.core.query_width)
            found["attention"] = found.get("attention", Part()) + part
    return found


def _matrices(size: int) -> Part:
    return Part(parameters=size, multiplied=size)
