"""What to make again: of all sets of kinds the one whose step takes least among those that fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import get_args

from moefold.layers.config import Kind
from moefold.planner.case import Case, kinds
from moefold.planner.hardware import Cluster, device
from moefold.planner.memory import peak_within, totals
from moefold.planner.memory_kept import layer_kept
from moefold.planner.time import estimate
from moefold.spec.layer import Module, Modules

PRICED = "H100"
"""The device whose rates price a step where a cluster's links are not known: a CPU's processes."""


def cheapest(case: Case, limit: float) -> Modules:
    """Return what to make again so that each device needs at most ``limit`` bytes.

    Raises:
        ValueError: where none of the sets fits, with the least that any needs.
    """
    sets = list(_sets(case))
    seconds = {again: _seconds(case, again) for again in sets}
    for again in sorted(sets, key=lambda one: (seconds[one], len(one))):
        if peak_within(_with(case, again), limit) is not None:
            return again
    least = min(max(totals(_with(case, again))) for again in sets)
    raise ValueError(
        f"layout.recompute.limit {limit / 1e9:.4g} GB: whatever is made again, the fullest rank "
        f"needs {least / 1e9:.4g} GB; raise the limit to that, or take a smaller micro-batch or "
        "more ranks"
    )


def _sets(case: Case) -> Iterator[Modules]:
    """Yield every set of kinds that drop anything, and whole blocks."""
    useful = _useful(case)
    sizes = range(len(useful) + 1)
    for chosen in chain.from_iterable(combinations(useful, size) for size in sizes):
        yield frozenset(chosen)
    yield frozenset(("block",))


def _useful(case: Case) -> list[Module]:
    rows = [part for block in kinds(case.decoder)[0] for part in layer_kept(case, block)]
    dropped = frozenset(chain.from_iterable(part.dropped for part in rows))
    return [kind for kind in get_args(Kind) if kind in dropped]


def _with(case: Case, again: Modules) -> Case:
    return replace(case, keeping=replace(case.keeping, recompute=again))


def _seconds(case: Case, again: Modules) -> float:
    here = case.cluster
    if here.devices > 1 and not here.device.link_bandwidth:
        priced = device(PRICED)
        case = replace(case, cluster=Cluster(priced, here.devices, 8, priced.domain))
    return estimate(_with(case, again)).seconds
