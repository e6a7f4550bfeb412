"""What a collective of a step is to the planner, and what all of its parts are made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moefold.mesh.pipeline import StagePart
from moefold.model.config import Block
from moefold.planner.case import Case
from moefold.schedule.table import Pair
from moefold.spec.decoder import block_weights, final_norm_weight
from moefold.spec.layer import Weight

FORWARD, BACKWARD = "forward", "backward"
Choices = Mapping[tuple[int, int], Mapping[int, Sequence[Sequence[int]]]]
"""By layer and micro-batch, for each rank that shares the experts, the experts of each of its rows;
the number of experts, or more, for none."""


@dataclass(frozen=True)
class Call:
    """Equal operations of one rank in a step."""

    group: str
    """Kind of group, as :data:`moefold.mesh.folding.KINDS` names it; ``ep inner 8`` for the ranks
    of an ep group in stretches of 8, ``ep outer 8`` for those at one place of each."""
    op: str
    bytes: float
    """Sent to others in one operation."""
    count: int
    """Operations in the step."""
    direction: str = FORWARD
    part: str = ""
    """What it is for."""
    beside: bool = False
    """Whether it runs in the groups of a second lane, beside another micro-batch's computing."""

    @property
    def total(self) -> float:
        """Bytes sent in the step."""
        return self.bytes * self.count


@dataclass(frozen=True)
class Step:
    """What one real step has beyond its case; without it, bytes are those of balanced routing."""

    choices: Choices | None = None


BALANCED = Step()


def gathers(size: float, ranks: int) -> float:
    """Return what a rank sends so that all have every rank's ``size`` bytes."""
    return size * (ranks - 1)


def sums(size: float, ranks: int) -> float:
    """Return what a rank sends so that all have the sum of ``size`` bytes: whole ones."""
    return 2 * (ranks - 1) * size // ranks


def both(group: str, size: float, ranks: int, count: int, again: int, part: str) -> Iterator[Call]:
    """Yield a gather of ``size`` bytes per rank and its mirror, a scattered sum of all of them.

    Either sends the same; ``again`` says how often forward runs.
    """
    moved = gathers(size, ranks)
    yield Call(group, "all_gather", moved, count * again, FORWARD, part)
    yield Call(group, "reduce_scatter", moved, count, BACKWARD, part)


def scattered(
    group: str, size: float, ranks: int, count: int, again: int, part: str
) -> Iterator[Call]:
    """Yield a scattered sum that leaves ``size`` bytes on each rank, and its mirror, a gather."""
    moved = gathers(size, ranks)
    yield Call(group, "reduce_scatter", moved, count * again, FORWARD, part)
    yield Call(group, "all_gather", moved, count, BACKWARD, part)


def place_weights(case: Case, place: StagePart) -> tuple[Weight, ...]:
    """Return the parameters of one thing that a stage computes, without embedding and head."""
    decoder = case.decoder
    if place.kind in ("layer", "multi_token"):
        number = place.index + decoder.layers * (place.kind == "multi_token")
        return tuple(block_weights(decoder.blocks[number], decoder.hidden, number))
    return (final_norm_weight(decoder),) if place.kind == "loss" else ()


def elements_here(case: Case, weight: Weight) -> float:
    """Return the elements of a parameter that one rank holds before data ranks share them."""
    return weight.local_elements(case.sizes.tp, case.sizes.ep, case.sizes.etp)


def stage_of(case: Case, rank: int) -> int:
    """Return the pipeline rank of a rank."""
    return case.folding.attention_coordinates(rank).pp


def layers_of(case: Case, rank: int) -> Iterator[tuple[int, Block]]:
    """Yield the number and the block of each layer that a rank runs."""
    for chunk in case.contents.parts[stage_of(case, rank)]:
        for place in chunk:
            if place.kind in ("layer", "multi_token"):
                number = place.index + case.decoder.layers * (place.kind == "multi_token")
                yield number, case.decoder.blocks[number]


def blocks_of(case: Case, rank: int) -> Iterator[tuple[Block, int]]:
    """Yield each different block of a rank, and how often it runs in a step."""
    found: dict[int, tuple[Block, int]] = {}
    for _, block in layers_of(case, rank):
        known = found.get(id(block), (block, 0))[1]
        found[id(block)] = block, known + case.num_micro_batches
    yield from found.values()


def runs(case: Case, *modules: str) -> int:
    """Return how often forward of a module runs for one micro-batch: again where recomputed."""
    return 2 if case.recompute & {"block", *modules} else 1


def paired(case: Case) -> bool:
    """Return whether any rank runs a forward beside a backward, exchanges in own groups."""
    if not case.schedule.overlaps_passes:
        return False
    return any(isinstance(step, Pair) for line in case.table.lines for step in line)


def has(case: Case, rank: int, kind: str) -> bool:
    """Return whether a rank has a place of a kind, such as ``loss``."""
    places = case.contents.parts[stage_of(case, rank)]
    return any(place.kind == kind for chunk in places for place in chunk)


def inside(kind: str, inner: int, ranks: int) -> str:
    """Return the name of stretches of ``inner`` ranks of a kind's groups, which have ``ranks``."""
    return kind if inner == ranks else f"{kind} inner {inner}"


def across(kind: str, inner: int) -> str:
    """Return the name of the ranks at one place of every such stretch."""
    return kind if inner == 1 else f"{kind} outer {inner}"


def by_group(calls: Sequence[Call], case: Case, rank: int) -> dict[tuple[str, str], list[float]]:
    """Return operations and bytes by group and operation, groups named as a run's recorder does.

    Kinds of the same ranks are one group, its name theirs joined with ``+``.
    """
    names = _names(case, rank)
    found: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        ranks = ranks_of(case, call.group, rank)
        name = names.setdefault(ranks, call.group)
        total = found.setdefault(("second " * call.beside + name, call.op), [0, 0])
        total[0] += call.count
        total[1] += call.total
    return found


def _names(case: Case, rank: int) -> dict[tuple[int, ...], str]:
    kinds: dict[str, list[str]] = {}
    for kind, first in case.folding.first_equal_kinds().items():
        kinds.setdefault(first, []).append(kind)
    return {
        case.folding.group(first, rank): "+".join(same)
        for first, same in kinds.items()
        if case.folding.group(first, rank)
    }


def ranks_of(case: Case, kind: str, rank: int) -> tuple[int, ...]:
    """Return the ranks of a rank's group, by the name that a :class:`Call` has for it."""
    name, level, inner = (*kind.split(), "", "1")[:3]
    if name == "stages":
        stages = map(int, level.split(","))
        return tuple(sorted(case.folding.rank_on_stage(rank, stage) for stage in stages))
    ranks = case.folding.group(name, rank)
    first, place = divmod(ranks.index(rank), int(inner))
    if level == "inner":
        return ranks[first * int(inner) : (first + 1) * int(inner)]
    return ranks[place :: int(inner)] if level == "outer" else ranks
