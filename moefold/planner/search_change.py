"""Suggested changes to a layout: all single changes, with their planned time and memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from moefold.mesh.config import AXES, Sizes
from moefold.mesh.legality import size_rules
from moefold.parallel.config import Layout
from moefold.planner.memory import rank_totals
from moefold.planner.memory_saved import INPUT_CODE_BYTES
from moefold.planner.recompute import MEMORY_RESERVE
from moefold.planner.search_space import SCHEDULES, full_space
from moefold.planner.task import LayoutChoice, TrainingTask
from moefold.planner.time import estimate_time
from moefold.spec.decoder import ModelNeeds, model_needs

GRAPHS: tuple[Literal["none", "partial", "step"], ...] = ("none", "partial", "step")
MAX_CHANGES = 5
"""Most changes that are returned."""


@dataclass(frozen=True)
class LayoutChange:
    """One change of a layout with its effect."""

    description: str
    choice: LayoutChoice
    saved_share: float
    """Seconds saved over seconds of the step; negative if it is slower."""
    saved_bytes: float
    """Bytes saved on the fullest device; negative if it needs more."""
    fits: bool


def suggest_changes(task: TrainingTask, choice: LayoutChoice) -> tuple[LayoutChange, ...]:
    """Return the most useful single changes.

    If the layout fits, these are changes that fit and are faster, the fastest first; otherwise
    changes that make it fit, the fastest first, or else those that save most memory.
    """
    case = choice.build_case(task)
    seconds, bytes_ = estimate_time(case).seconds, max(rank_totals(case))
    room = task.cluster.device.memory_bytes
    if bytes_ <= room * (1 - MEMORY_RESERVE):
        room *= 1 - MEMORY_RESERVE
    found: list[LayoutChange] = []
    timed = []
    for what, other in _single_changes(task, choice):
        try:
            tried = other.build_case(task)
            sizes = other.sizes
            if any(other.schedule.violations(sizes.pp, sizes.vpp, tried.num_micro_batches)):
                continue
            timed.append((estimate_time(tried).seconds, what, other, tried))
        except ValueError:
            continue
    timed.sort(key=lambda item: item[0])
    enough = bytes_ <= room
    for took, what, other, tried in timed:
        if enough and (took >= seconds or len(found) == MAX_CHANGES):
            break
        needed = max(rank_totals(tried))
        if enough and needed > room:
            continue
        found.append(LayoutChange(what, other, 1 - took / seconds, bytes_ - needed, needed <= room))
    if not enough:
        found = [one for one in found if one.saved_bytes > 0]
        fitting = [one for one in found if one.fits]
        found = fitting or sorted(found, key=lambda one: -one.saved_bytes)
    return tuple(found[:MAX_CHANGES])


def _single_changes(task: TrainingTask, choice: LayoutChoice) -> Iterator[tuple[str, LayoutChoice]]:
    """Yield all changes of one policy, or of one size by a factor of two, with descriptions."""
    space, keeping = full_space(task), choice.memory_policy
    model = model_needs(task.decoder, task.seq)
    bare = replace(choice, stages=None)
    for axis in AXES:
        now = getattr(choice.sizes, axis)
        for size in (2 * now, now // 2):
            sizes = Sizes(**{**dict(choice.sizes), axis: max(1, size)})
            legal = not size_rules(sizes, model, model.layers)
            if size and legal and task.cluster.devices % sizes.smallest_world == 0:
                yield f"{axis} {now} → {size}", replace(bare, sizes=sizes)
    for schedule in SCHEDULES:
        other = replace(bare, schedule=schedule)
        if other.schedule.name != choice.schedule.name:
            yield f"schedule {other.schedule.name}", other
    for dispatch in space.dispatchers if choice.sizes.ep > 1 else ():
        if dispatch != choice.dispatch:
            yield f"dispatch {dispatch}", replace(choice, dispatch=dispatch)
    for graphs in GRAPHS if task.software.stack == "moefold" else ():
        other = replace(choice, graphs=graphs)
        if graphs != choice.graphs and _graphs_allowed(other, model):
            yield f"graphs {graphs}", other
    for size in (choice.micro_batch * 2, choice.micro_batch // 2):
        if size:
            yield f"micro_batch {choice.micro_batch} → {size}", replace(choice, micro_batch=size)
    for again in space.recomputes:
        if again != keeping.recompute:
            said = " + ".join(sorted(again)) or "nothing"
            other = replace(keeping, recompute=again)
            yield f"recompute {said}", replace(choice, memory_policy=other)
    for recipe in space.recipes:
        if recipe != choice.recipe:
            yield f"precision {recipe}", replace(choice, recipe=recipe)
    priced = task.software.stack == "moefold" or choice.sizes.pp == 1
    for zero in (1, 2, 3) if priced else (1, 2):
        if zero != keeping.zero:
            other = replace(keeping, zero=zero)
            yield f"zero {keeping.zero} → {zero}", replace(choice, memory_policy=other)
    if task.cluster.device.host_bandwidth and not keeping.optimizer_offload:
        other = replace(keeping, optimizer_offload=1.0)
        yield "optimizer states on the host", replace(choice, memory_policy=other)


def _graphs_allowed(choice: LayoutChoice, model: ModelNeeds) -> bool:
    """Return whether a run file with a layout's graphs is legal."""
    keeping = choice.memory_policy
    if choice.graphs == "none":
        return True
    if (
        keeping.offload | keeping.disk
        or keeping.optimizer_offload
        or choice.recipe in INPUT_CODE_BYTES
    ):
        return False
    room = {"max_rows": choice.max_rows} if choice.max_rows else {}
    layout = Layout.model_validate(
        {
            "sizes": choice.sizes.text, "graphs": choice.graphs, "zero": keeping.zero,
            "schedule": choice.schedule, "dispatch": {"kind": choice.dispatch, **room},
        }
    )  # fmt: skip
    return all(one.path not in (("graphs",), ("zero",)) for one in layout.violations(model))
