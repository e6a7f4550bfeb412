"""Measurement of one rank of a large layout on this machine alone, beside its plan."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moefold.comm.lone import LoneWorld, lone_world
from moefold.comm.recorder import CallSite, Total
from moefold.mesh.folding import Ranks
from moefold.training.machine import one_thread
from moefold.training.memory_bench import PARTS as MEMORY_PARTS
from moefold.training.memory_bench import planned_bytes
from moefold.training.memory_probe import measure_step, state_bytes
from moefold.training.rank_step import RankStep
from moefold.training.rank_task import LoneRank

EXCHANGES: tuple[str, ...] = ("tp", "cp", "dispatch", "pp", "dp")
"""Kinds of exchanges, as a plan names them; ``pp`` are messages between stages, and ``dp`` all that
runs once per step or for whole weights."""
DISPATCH = ("dispatch", "combine", "experts")
WHOLE_STEP = ("step", "weights", "gradients", "counters", "optimizer", "figures", "room", "graphs")
"""Last words of the labels under which a recorder has operations."""


@dataclass(frozen=True)
class Exchanged:
    """One kind of exchange in a step of a rank."""

    calls: int
    bytes: int
    """Bytes that the rank sends."""
    seconds: float
    """Seconds by the links of the planner, none of it hidden."""


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's measured step."""

    seconds: Mapping[str, float]
    """By part, copies included: of the process on a CPU, else of the device."""
    copy_seconds: float
    """Seconds of copies instead of exchanges; 0 on a GPU, where they run among other kernels."""
    exchanges: Mapping[str, Exchanged]
    bytes: Mapping[str, tuple[float, float]]
    """Measured and planned bytes by part, after the action for which most is planned."""
    peak: tuple[float | None, float]
    """Measured and planned peak within actions; measured by a GPU's allocator alone."""


def measure(task: LoneRank, device: torch.device, steps: int) -> MeasuredRank:
    """Run steps of a rank without the others; return what the fastest takes."""
    case = task.case
    threads = one_thread() if device.type == "cpu" else nullcontext()
    with threads, lone_world(case.folding, task.rank, device) as world:
        rank = RankStep(world, task.run, case)
        rank.timed()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        timed = list[tuple[float, float, dict[str, float]]]()
        for _ in range(steps):
            before = _copies(world)
            seconds = rank.timed()
            timed.append((sum(seconds.values()), _copies(world) - before, seconds))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        _, copies, seconds = min(timed, key=lambda one: one[0])
        totals = rank.totals()
        exchanges = price(task, totals, world.ranks_of if isinstance(world, LoneWorld) else {})
        held = _bytes_of(task, rank)
    return MeasuredRank(seconds, copies, exchanges, held, (peak, task.memory.peak_allocated))


def _copies(world: Any) -> float:
    return world.copy_seconds if isinstance(world, LoneWorld) else 0.0


def price(
    task: LoneRank, totals: Mapping[CallSite, Total], ranks: Mapping[str, Ranks]
) -> dict[str, Exchanged]:
    """Return a step's exchanges by kind, with their seconds by the links of the planner."""
    found = dict.fromkeys(EXCHANGES, Exchanged(0, 0, 0.0))
    for site, total in totals.items():
        kind = kind_of(site)
        seconds = task.exchange_seconds(site.op, total.bytes, total.calls, ranks[site.group])
        so_far = found[kind]
        found[kind] = Exchanged(
            so_far.calls + total.calls, so_far.bytes + total.bytes, so_far.seconds + seconds
        )
    return found


def kind_of(site: CallSite) -> str:
    """Return the kind of an exchange by the label and the group of its call site."""
    word = site.label.rpartition(".")[2]
    kinds = {kind.split()[0] for kind in site.group.removeprefix("second ").split("+")}
    if word == "pipeline":
        return "pp"
    if word in DISPATCH:
        return "dispatch"
    if word in WHOLE_STEP:
        return "dp"
    if "tp" in kinds:
        return "tp"
    return "cp" if "cp" in kinds or "tp_cp" in kinds else "dp"


def _bytes_of(task: LoneRank, rank: RankStep) -> dict[str, tuple[float, float]]:
    """Return measured and planned bytes by part, after the action for which most is planned."""
    planned = [by for by, _ in planned_bytes(task.case, task.case.layout, task.pipeline_rank)]
    moments = state_bytes(rank.state, rank.optimizer)["moments"]
    steps = measure_step(rank.state, rank.batches, rank.loss_chunk, planned)
    totals = [sum(parts[name] for name in MEMORY_PARTS) for parts in planned]
    fullest = totals.index(max(totals))
    measured = {**dict.fromkeys(MEMORY_PARTS, 0), **steps[fullest], "moments": moments}
    return {name: (measured[name], planned[fullest][name]) for name in MEMORY_PARTS}
