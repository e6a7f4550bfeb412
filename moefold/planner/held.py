"""What each chunk of a pipeline holds, equal layers counted: a deep model costs no more to plan."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from moefold.mesh.pipeline import Place, Stages, Way
from moefold.model.config import Block, Decoder
from moefold.planner.remember import remembered


class Held(NamedTuple):
    """What some chunks compute."""

    layers: tuple[tuple[int, int], ...] = ()
    """Kinds of blocks, as :func:`kinds` numbers them, and how many of each."""
    multi_token: int = 0
    """Multi-token prediction layers, each with a loss of its own."""
    embedding: bool = False
    loss: bool = False
    """Whether the last norm, the head and the loss are there."""

    @property
    def number(self) -> int:
        """Layers of all kinds."""
        return sum(count for _, count in self.layers)


@remembered(256)
def kinds(decoder: Decoder) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the different blocks of a model, and for each of its layers which one it is."""
    numbers: dict[Block, int] = {}
    order = tuple(numbers.setdefault(block, len(numbers)) for block in decoder.blocks)
    return tuple(numbers), order


@remembered(4096)
def places(stages: Stages, pp: int, way: Way) -> tuple[tuple[tuple[Place, ...], ...], ...]:
    """Return what each chunk of each pipeline rank computes: ``[rank][chunk]``."""
    return stages.table(pp, way)


@remembered(4096)
def chunks(decoder: Decoder, stages: Stages, pp: int, way: Way) -> tuple[tuple[Held, ...], ...]:
    """Return the same, counted."""
    order = kinds(decoder)[1]
    return tuple(
        tuple(_counted(chunk, order) for chunk in rank) for rank in places(stages, pp, way)
    )


@remembered(4096)
def ranks(decoder: Decoder, stages: Stages, pp: int, way: Way) -> tuple[Held, ...]:
    """Return the same of each rank, over its chunks."""
    order = kinds(decoder)[1]
    each = ((place for chunk in rank for place in chunk) for rank in places(stages, pp, way))
    return tuple(_counted(rank, order) for rank in each)


def _counted(found: Iterable[Place], order: tuple[int, ...]) -> Held:
    layers: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for place in found:
        if place.kind == "layer":
            layers[order[place.index]] += 1
        else:
            others[place.kind] += 1
    return Held(
        tuple(sorted(layers.items())),
        others["multi_token"],
        others["embedding"] > 0,
        others["loss"] > 0,
    )
