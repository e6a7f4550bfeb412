"""Exact counts of a described decoder: parameters, active parameters, FLOPs. No torch.

A layer kind is counted by one function per record class, so that a new kind brings its own.
FLOPs count a multiply-add as 2, forward and backward as 3 forwards, no recompute, and leave out
norms, embedding look-up, router and the gate of a shared expert (the convention of Megatron-LM's
published figures).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla
from moefold.model.config import Decoder, Stack
from moefold.moe.config import Moe


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
    """Multiply-adds per token and per token it attends to."""
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
        return 6 * products + (3 if causal else 6) * pairs

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
            found = {"norms": Part(parameters=2 * decoder.hidden)}
            for record in (block.attention, block.ffn):
                for name, part in _counter(record)(record, decoder.hidden).items():
                    found[name] = found.get(name, Part()) + part
            for name, part in found.items():
                parts[name] = parts.get(name, Part()) + part.times(stack.repeat)
    if multi_token:
        parts["multi_token"] = _multi_token(decoder).times(multi_token)
    return Counts(parts)


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


def _counter(record: Record) -> Callable[[Any, int], dict[str, Part]]:
    """Return how a layer is counted: as its kind says, or as the kind that it inherits from."""
    for kind in type(record).__mro__:
        if kind in KINDS:
            return KINDS[kind]
    name = type(record).__name__
    raise ValueError(
        f"{name} is not counted: inherit from a kind that is, or set "
        f"moefold.planner.count.KINDS[{name}]"
    )


def _matrices(size: int) -> Part:
    return Part(parameters=size, multiplied=size)


def _gqa(record: Gqa, hidden: int) -> dict[str, Part]:
    dim = record.head_dim
    products = hidden * dim * (2 * record.heads + 2 * record.kv_heads)
    heads = {"none": 0, "head": 2, "projection": record.heads + record.kv_heads}[record.qk_norm]
    attended = Part(attended=2 * record.heads * dim)
    return {"attention": _matrices(products) + attended, "norms": Part(parameters=heads * dim)}


def _mla(record: Mla, hidden: int) -> dict[str, Part]:
    qk_dim, heads = record.nope_dim + record.rope_dim, record.heads
    rank = record.q_rank
    query = hidden * heads * qk_dim if rank is None else rank * (hidden + heads * qk_dim)
    down = hidden * (record.kv_rank + record.rope_dim)
    up = record.kv_rank * heads * (record.nope_dim + record.v_dim)
    out = heads * record.v_dim * hidden
    attended = Part(attended=heads * (qk_dim + record.v_dim))
    # The convention counts the norms on the latents, alone among norms, as one product each.
    norms = _matrices(record.kv_rank + (rank or 0))
    return {"attention": _matrices(query + down + up + out) + attended, "norms": norms}


def _dense(record: Dense, hidden: int) -> dict[str, Part]:
    return {"ffn": _matrices(3 * hidden * record.width)}


def _moe(record: Moe, hidden: int) -> dict[str, Part]:
    expert, router = 3 * hidden * record.width, record.router
    routed = Part(
        parameters=expert * router.experts,
        idle=expert * (router.experts - router.top_k),
        multiplied=expert * router.top_k,
        experts=expert * router.experts,
    )
    parts = {"experts": routed, "router": Part(parameters=router.experts * hidden)}
    if record.shared is not None:
        gate = Part(parameters=hidden if record.shared.gate else 0)
        parts["shared"] = _matrices(3 * hidden * record.shared.width) + gate
    return parts


KINDS: dict[type[Record], Callable[[Any, int], dict[str, Part]]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
}
"""How each kind of layer is counted."""
