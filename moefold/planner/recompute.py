"""Choice of modules to recompute and to offload: the fastest step that fits in memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from math import inf
from typing import Literal, get_args

from moefold.layers.config import OffloadKind, RecomputeKind
from moefold.planner.case import Case, MemoryPolicy, distinct_blocks
from moefold.planner.hardware import Cluster, device_by_name
from moefold.planner.memory import peak_within
from moefold.planner.memory_saved import saved_tensors_of
from moefold.planner.time import estimate_time
from moefold.spec.layer import NOTHING, Module, Modules

FALLBACK_DEVICE = "H100"
"""Device whose rates are used where a cluster's links are unknown: processes on a CPU."""
MEMORY_RESERVE = 0.05
"""Share of memory that a layout of a search leaves free: measured peaks are up to 8 % off."""
OffloadTarget = Literal["offload", "disk"] | None
"""Offload target, by the name of its field of :class:`MemoryPolicy`."""


def choose_recompute(
    case: Case, limit: float | None = None, place: OffloadTarget = None
) -> MemoryPolicy:
    """Return the fastest choice of recompute and offload with at most ``limit`` bytes per device;
    None is the device's memory less the reserve.

    Raises:
        ValueError: none fits; the message states the least that is needed.
    """
    limit = resolve_memory_limit(case, limit, place)
    best: tuple[float, MemoryPolicy] | None = None
    seconds = {again: _seconds(_with_policy(case, again)) for again in _recompute_sets(case)}
    for again in sorted(seconds, key=lambda one: (seconds[one], len(one))):
        # Offloading only adds time.
        if best is not None and seconds[again] >= best[0]:
            break
        away = [
            _with_policy(case, again, place, kinds) for kinds in _offload_sets(case, again, place)
        ]
        took = {one.memory_policy: _seconds(one) if place else seconds[again] for one in away}
        for one in sorted(away, key=lambda one: took[one.memory_policy]):
            if best is not None and took[one.memory_policy] >= best[0]:
                break
            if peak_within(one, limit) is not None:
                best = took[one.memory_policy], one.memory_policy
    assert best is not None
    return best[1]


def resolve_memory_limit(
    case: Case, limit: float | None = None, place: OffloadTarget = None
) -> float:
    """Check that some choice of recompute and offload needs at most ``limit`` bytes per device, and
    return the limit; None is the device's memory less the reserve.

    Raises:
        ValueError: none does; the message states the least that is needed.
    """
    room = case.cluster.device.memory_bytes * (1 - MEMORY_RESERVE) if limit is None else limit
    most = list(_recompute_sets(case))[::-1]
    # With offload, the sets that recompute most need least memory. Offloading everything need not
    # be the minimum, as activations are fetched layers before they are read.
    tries = chain(
        ((again, NOTHING) for again in most),
        ((again, away) for again in most[:2] for away in _offload_sets(case, again, place)),
    )
    least = inf
    for again, away in tries:
        found = peak_within(_with_policy(case, again, place, away), least)
        least = least if found is None else found
        if least <= room:
            return room
    size, more = f"{room / 1e9:.4g} GB", "raise the limit, or "
    stated = f"layout.recompute.limit {size}"
    if limit is None:
        stated, more = (
            f"layout.recompute auto with {size} (memory less {100 * MEMORY_RESERVE:.0f} %)",
            "",
        )
    raise ValueError(
        f"{stated}: whatever is recomputed, the fullest rank needs {least / 1e9:.4g} GB; "
        f"{more}use a smaller micro-batch or more ranks"
    )


def _recompute_sets(case: Case) -> Iterator[Modules]:
    """Yield every set of modules whose recompute saves memory, and whole blocks."""
    rows = [
        part for block in distinct_blocks(case.decoder)[0] for part in saved_tensors_of(case, block)
    ]
    dropped = frozenset(chain.from_iterable(part.freed_by for part in rows))
    yield from _subsets([kind for kind in get_args(RecomputeKind) if kind in dropped])
    yield frozenset(("block",))


def _offload_sets(case: Case, again: Modules, place: OffloadTarget) -> Iterator[Modules]:
    """Yield every set of modules with saved activations that could be offloaded."""
    rows = [
        part for block in distinct_blocks(case.decoder)[0] for part in saved_tensors_of(case, block)
    ]
    stay = {part.module for part in rows if part.is_saved_under(again)} - (again & {"norms"})
    yield from _subsets([kind for kind in get_args(OffloadKind) if place and kind in stay])


def _subsets(kinds: list[Module]) -> Iterator[Modules]:
    """Yield all subsets of ``kinds`` by size, from the empty set to the full one."""
    for size in range(len(kinds) + 1):
        yield from map(frozenset, combinations(kinds, size))


def _with_policy(
    case: Case, again: Modules, place: OffloadTarget = None, away: Modules = NOTHING
) -> Case:
    given = {place: away} if place else {}
    return replace(case, memory_policy=replace(case.memory_policy, recompute=again, **given))


def _seconds(case: Case) -> float:
    here = case.cluster
    if here.devices > 1 and not here.device.link_bandwidth:
        priced = device_by_name(FALLBACK_DEVICE)
        case = replace(case, cluster=Cluster(priced, here.devices, 8, priced.domain))
    return estimate_time(case).seconds
