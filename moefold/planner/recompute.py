"""Choice of modules to recompute and to offload: the fastest step that fits in memory."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations
from math import inf
from typing import Any, get_args

from moefold.layers.config import (
    Auto,
    Offload,
    OffloadKind,
    OffloadToDisk,
    OffloadToHost,
    RecomputeKind,
)
from moefold.parallel.config import Layout
from moefold.planner.case import Case, distinct_blocks
from moefold.planner.hardware import Cluster, device_by_name
from moefold.planner.layouts import make_recompute
from moefold.planner.memory import peak_within
from moefold.planner.memory_saved import saved_tensors_of
from moefold.planner.time import estimate_time
from moefold.spec.layer import NOTHING, Module, Modules

FALLBACK_DEVICE = "H100"
"""Device whose rates are used where a cluster's links are unknown: processes on a CPU."""
MEMORY_RESERVE = 0.05
"""Share of memory that a layout of a search leaves free: measured peaks are up to 8 % off."""


def choose_recompute(case: Case, auto: Auto) -> Layout:
    """Return the case's layout with the fastest choice of recompute and of offload that needs at
    most the policy's limit per device; without one, the device's memory less the reserve.

    Raises:
        ValueError: none fits; the message states the least that is needed.
    """
    limit = resolve_memory_limit(case, auto)
    best: tuple[float, Layout] | None = None
    seconds = {
        modules: _seconds(_with_choice(case, auto, modules)) for modules in _recompute_sets(case)
    }
    offloads = auto.host or auto.disk is not None
    for recompute in sorted(seconds, key=lambda modules: (seconds[modules], len(modules))):
        # Offloading only adds time.
        if best is not None and seconds[recompute] >= best[0]:
            break
        sets = _offload_sets(case, recompute, offloads)
        cases = [_with_choice(case, auto, recompute, offload) for offload in sets]
        timed = [(_seconds(trial) if offloads else seconds[recompute], trial) for trial in cases]
        for took, trial in sorted(timed, key=lambda pair: pair[0]):
            if best is not None and took >= best[0]:
                break
            if peak_within(trial, limit) is not None:
                best = took, trial.layout
    assert best is not None
    return best[1]


def resolve_memory_limit(case: Case, auto: Auto) -> float:
    """Check that some choice of recompute and offload needs at most the policy's limit per device,
    and return the limit in bytes: without one, the device's memory less the reserve.

    Raises:
        ValueError: none does; the message states the least that is needed.
    """
    limit = auto.bytes
    offloads = auto.host or auto.disk is not None
    room = case.cluster.device.memory_bytes * (1 - MEMORY_RESERVE) if limit is None else limit
    by_memory = list(_recompute_sets(case))[::-1]
    # With offload, the sets that recompute most need least memory. Offloading everything need not
    # be the minimum, as activations are fetched layers before they are read.
    trials = chain(
        ((recompute, NOTHING) for recompute in by_memory),
        (
            (again, offload)
            for again in by_memory[:2]
            for offload in _offload_sets(case, again, offloads)
        ),
    )
    least = inf
    for recompute, offload in trials:
        peak = peak_within(_with_choice(case, auto, recompute, offload), least)
        least = least if peak is None else peak
        if least <= room:
            return room
    size = f"{room / 1e9:.4g} GB"
    advice = "raise the limit, or "
    stated = f"layout.recompute.limit {size}"
    if limit is None:
        reserve = f"memory less {100 * MEMORY_RESERVE:.0f} %"
        advice = ""
        stated = f"layout.recompute auto with {size} ({reserve})"
    raise ValueError(
        f"{stated}: whatever is recomputed, the fullest rank needs {least / 1e9:.4g} GB; "
        f"{advice}use a smaller micro-batch or more ranks"
    )


def _recompute_sets(case: Case) -> Iterator[Modules]:
    """Yield every set of modules whose recompute saves memory, and whole blocks."""
    blocks, _ = distinct_blocks(case.decoder)
    saved = (tensor for block in blocks for tensor in saved_tensors_of(case, block))
    dropped = frozenset(chain.from_iterable(tensor.freed_by for tensor in saved))
    yield from _subsets([kind for kind in get_args(RecomputeKind) if kind in dropped])
    yield frozenset(("block",))


def _offload_sets(case: Case, recompute: Modules, offloads: bool) -> Iterator[Modules]:
    """Yield every set of modules with saved activations that could be offloaded, if any may be."""
    blocks, _ = distinct_blocks(case.decoder)
    saved = (tensor for block in blocks for tensor in saved_tensors_of(case, block))
    movable = {tensor.module for tensor in saved if tensor.is_saved_under(recompute)}
    movable -= recompute & {"norms"}
    yield from _subsets([kind for kind in get_args(OffloadKind) if offloads and kind in movable])


def _subsets(kinds: list[Module]) -> Iterator[Modules]:
    """Yield all subsets of ``kinds`` by size, from the empty set to the full one."""
    for size in range(len(kinds) + 1):
        yield from map(frozenset, combinations(kinds, size))


def _with_choice(case: Case, auto: Auto, recompute: Modules, offload: Modules = NOTHING) -> Case:
    """Return a case with choices in place of ``auto``."""
    update: dict[str, Any] = {"recompute": make_recompute(recompute)}
    if offload:
        update["offload"] = _offload_to(offload, auto.disk)
    return replace(case, layout=case.layout.model_copy(update=update))


@lru_cache(maxsize=256)
def _offload_to(modules: Modules, folder: str | None) -> Offload:
    """Return the record that offloads modules to a folder on disk, or without one to the host."""
    names: Any = tuple(sorted(modules))
    if folder is None:
        return Offload(host=OffloadToHost(modules=names))
    return Offload(disk=OffloadToDisk(modules=names, folder=folder))


def _seconds(case: Case) -> float:
    cluster = case.cluster
    if cluster.devices > 1 and not cluster.device.link_bandwidth:
        device = device_by_name(FALLBACK_DEVICE)
        case = replace(case, cluster=Cluster(device, cluster.devices, 8, device.domain))
    return estimate_time(case).seconds
