"""What an update of whole matrices exchanges, as ``parallel/data/matrices.py`` does it.

Every matrix has one owner among the ranks that share its parameter. Runs of its elements go to the
owner, slices of other tensor ranks are gathered there, and results go back the way they came.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from moefold.mesh.partition import assign_owners
from moefold.planner.case import Case
from moefold.spec.layer import Axis, Weight
from tests.traffic.calls import (
    BACKWARD,
    BALANCED,
    Call,
    Step,
    elements_here,
    gathers,
    inside,
    ranks_of,
)
from tests.traffic.data import buckets_of, copies_of, held, levels


class Matrix(NamedTuple):
    """One matrix of a parameter, or this rank's slice of it."""

    start: int
    """Its first element in the parameter."""
    size: int
    runs: tuple[tuple[int, int], ...]
    """The elements of the parameter that each rank updates."""
    axis: str
    """The axis whose ranks hold its other slices; empty where it is whole."""

    def overlap(self, rank: int) -> int:
        """Return how many of its elements a rank updates."""
        first, last = self.runs[rank]
        return max(0, min(last, self.start + self.size) - max(first, self.start))


def optimizer(case: Case, rank: int, step: Step = BALANCED) -> Iterator[Call]:
    """Yield what a rank exchanges so that each matrix is whole on one of those that share it."""
    weights = held(case, rank)
    wanted = [w for w in weights if case.number_formats.optimizer.needs_whole(w.name, w.shape)]
    parts = _parts(case, weights)
    alike: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
    names: dict[tuple[int, ...], str] = {}
    for weight in wanted:
        kind = copies_of(weight)
        inner, outer = levels(case, kind)
        name = inside(kind, inner, inner * outer)
        ranks = ranks_of(case, name, rank) if inner > 1 else (rank,)
        names.setdefault(ranks, name)
        alike[ranks] += _matrices(case, weight, parts.get(weight.name))
    for ranks, matrices in alike.items():
        yield from _exchange(case, names[ranks], ranks.index(rank), len(ranks), matrices)


def _parts(case: Case, weights: list[Weight]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return which elements of each shared parameter the ranks that share it update."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for bucket in buckets_of(case, weights):
        runs = [bucket.run(at) for at in range(bucket.ranks)]
        found |= {name: tuple(run[name] for run in runs) for name in runs[0]}
    return found


def _matrices(
    case: Case, weight: Weight, runs: tuple[tuple[int, int], ...] | None
) -> Iterator[Matrix]:
    """Yield the matrices of a parameter as a rank holds them."""
    axis: Axis = "etp" if weight.is_expert else "tp"
    ways, dims = getattr(case.sizes, axis), len(weight.shape)
    cut_dims = [dim for dim, units in weight.cuts if units.axis == axis]
    cut = max(cut_dims, default=-1) >= max(dims - 2, 0) and ways > 1
    whole = round(elements_here(case, weight))
    size = prod(weight.shape[-2:]) // (ways if cut else 1)
    for start in range(0, whole, size):
        yield Matrix(start, size, runs or ((0, whole),), axis if cut else "")


def _exchange(
    case: Case, group: str, place: int, ranks: int, matrices: Sequence[Matrix]
) -> Iterator[Call]:
    """Yield the exchange there, the gathers of slices, and the exchange back."""
    width = case.number_formats.master_bytes
    owners = assign_owners([matrix.size for matrix in matrices], ranks)
    mine = [m for m, owner in zip(matrices, owners, strict=True) if owner == place]
    if ranks > 1:
        others = [m for m, owner in zip(matrices, owners, strict=True) if owner != place]
        there = sum(matrix.overlap(place) for matrix in others)
        back = sum(m.overlap(rank) for m in mine for rank in range(ranks) if rank != place)
        for count in (there, back):
            yield Call(group, "all_to_all", count * width, 1, BACKWARD, "optimizer")
    for axis in sorted({matrix.axis for matrix in mine} - {""}):
        size = sum(matrix.size for matrix in mine if matrix.axis == axis) * width
        ways = getattr(case.sizes, axis)
        yield Call(axis, "all_gather", gathers(size, ways), 1, BACKWARD, "optimizer")
