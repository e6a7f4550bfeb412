"""What a model asks of the sizes of a layout: which of its dims an axis must divide.

A kind of layer states its needs by one function per record class, so that a new kind brings its
own: ``NEEDS[MyAttention] = lambda record: [divides("tp", "heads", record.heads)]``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moefold.config.base import Record
from moefold.layers.config import Dense, Gqa, Mla
from moefold.model.config import Decoder
from moefold.moe.config import Moe


class Need(NamedTuple):
    """The size of an axis must divide ``size``; ``rule`` says so in words."""

    axis: str
    size: int
    rule: str
    of_heads: bool = False
    """Whether it counts heads, which context ranks may share further."""


def divides(axis: str, what: str, size: int, of_heads: bool = False) -> Need:
    """Return the need that an axis divides one of the model's dims."""
    return Need(axis, size, f"{axis} divides {what} ({size})", of_heads)


@dataclass(frozen=True)
class Model:
    """What legality reads of a model."""

    needs: tuple[Need, ...]
    """Each once."""
    mixtures: tuple[bool, ...]
    """For each layer, whether it has experts."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mixtures)

    @property
    def heads(self) -> tuple[int, ...]:
        """The different numbers of heads and of key-value heads that layers have."""
        return tuple(dict.fromkeys(need.size for need in self.needs if need.of_heads))

    @property
    def experts(self) -> tuple[int, ...]:
        """The different numbers of experts that layers have, as their needs state them."""
        stated = tuple(need.size for need in self.needs if need.axis == "ep")
        return stated if any(self.mixtures) else ()


def needs(decoder: Decoder, seq: int | None = None) -> Model:
    """Return what a decoder asks, trained on sequences of ``seq`` tokens where that is known.

    A sequence is cut into ``2 * cp`` pieces, of which a rank takes one from either end, so that
    each has the same work under a causal mask.
    """
    found = [divides("tp", "the vocabulary", decoder.vocab)]
    if seq is not None:
        rule = f"cp is 1, or 2 * cp divides the length of a sequence ({seq})"
        found.append(Need("cp", seq // 2 if seq % 2 == 0 else 1, rule))
    mixtures: list[bool] = []
    for stack in decoder.stacks:
        pattern = []
        for block in stack.blocks:
            own = [*needs_of(block.attention), *needs_of(block.ffn)]
            found += own
            pattern.append(any(need.axis == "ep" for need in own))
        mixtures += pattern * stack.repeat
    if not any(mixtures):
        found += [Need(axis, 1, f"{axis} needs layers with experts") for axis in ("ep", "etp")]
    return Model(tuple(dict.fromkeys(found)), tuple(mixtures))


def needs_of(record: Record) -> Iterable[Need]:
    """Return what one layer's record asks; nothing where its kind states no needs."""
    stated = (NEEDS[kind] for kind in type(record).__mro__ if kind in NEEDS)
    return next(stated, lambda _: ())(record)


def _gqa(record: Gqa) -> Iterator[Need]:
    yield divides("tp", "attention heads", record.heads, of_heads=True)
    yield divides("tp", "key-value heads", record.kv_heads, of_heads=True)


def _mla(record: Mla) -> Iterator[Need]:
    yield divides("tp", "attention heads", record.heads, of_heads=True)


def _dense(record: Dense) -> Iterator[Need]:
    yield divides("tp", "the feed-forward's width", record.width)


def _moe(record: Moe) -> Iterator[Need]:
    yield divides("ep", "the experts", record.router.experts)
    yield divides("etp", "the experts' width", record.width)
    if record.shared is not None:
        yield divides("tp", "the shared expert's width", record.shared.width)


NEEDS: dict[type, Callable[[Any], Iterable[Need]]] = {
    Gqa: _gqa,
    Mla: _mla,
    Dense: _dense,
    Moe: _moe,
}
