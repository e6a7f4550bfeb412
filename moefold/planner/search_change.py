"""Suggested changes to a layout: all single changes, with their planned time and memory."""

from collections.abc import Iterator
from contextlib import suppress
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
    memory = task.cluster.device.memory_bytes
    seconds = estimate_time(case).seconds
    peak = max(rank_totals(case))
    limit = memory * (1 - MEMORY_RESERVE) if peak <= memory * (1 - MEMORY_RESERVE) else memory
    timed = []
    for description, changed in _single_changes(task, choice):
        with suppress(ValueError):
            changed_case = changed.build_case(task)
            timed.append((estimate_time(changed_case).seconds, description, changed, changed_case))
    timed.sort(key=lambda entry: entry[0])
    fits = peak <= limit
    changes = list[LayoutChange]()
    for changed_seconds, description, changed, changed_case in timed:
        if fits and (changed_seconds >= seconds or len(changes) == MAX_CHANGES):
            break
        changed_peak = max(rank_totals(changed_case))
        saved_share = 1 - changed_seconds / seconds
        saved_bytes = peak - changed_peak
        if changed_peak <= limit if fits else saved_bytes > 0:
            changes.append(
                LayoutChange(description, changed, saved_share, saved_bytes, changed_peak <= limit)
            )
    if not fits:
        fitting = [change for change in changes if change.fits]
        changes = fitting or sorted(changes, key=lambda change: -change.saved_bytes)
    return tuple(changes[:MAX_CHANGES])


def _single_changes(task: TrainingTask, choice: LayoutChoice) -> Iterator[tuple[str, LayoutChoice]]:
    """Yield all changes of one policy, or of one size by a factor of two, with descriptions."""
    space = full_space(task)
    policy = choice.memory_policy
    model = model_needs(task.decoder, task.seq)
    balanced = replace(choice, stages=None)
    for axis in AXES:
        current = getattr(choice.sizes, axis)
        for size in (2 * current, current // 2):
            sizes = Sizes(**{**dict(choice.sizes), axis: max(1, size)})
            legal = not size_rules(sizes, model, model.layers)
            if size and legal and task.cluster.devices % sizes.smallest_world == 0:
                yield f"{axis} {current} → {size}", replace(balanced, sizes=sizes)
    for schedule in SCHEDULES:
        changed = replace(balanced, schedule=schedule)
        if changed.schedule.name != choice.schedule.name:
            yield f"schedule {changed.schedule.name}", changed
    for dispatch in space.dispatchers if choice.sizes.ep > 1 else ():
        if dispatch != choice.dispatch:
            yield f"dispatch {dispatch}", replace(choice, dispatch=dispatch)
    for graphs in GRAPHS if task.software.stack == "moefold" else ():
        changed = replace(choice, graphs=graphs)
        if graphs != choice.graphs and _graphs_allowed(changed, model):
            yield f"graphs {graphs}", changed
    for size in (choice.micro_batch * 2, choice.micro_batch // 2):
        if size:
            yield f"micro_batch {choice.micro_batch} → {size}", replace(choice, micro_batch=size)
    for modules in space.recomputes:
        if modules != policy.recompute:
            changed = replace(policy, recompute=modules)
            names = " + ".join(sorted(modules)) or "nothing"
            yield f"recompute {names}", replace(choice, memory_policy=changed)
    for recipe in space.recipes:
        if recipe != choice.recipe:
            yield f"precision {recipe}", replace(choice, recipe=recipe)
    # The time of ZeRO 3 in a pipeline is known of moefold only.
    stages = (1, 2, 3) if task.software.stack == "moefold" or choice.sizes.pp == 1 else (1, 2)
    for zero in stages:
        if zero != policy.zero:
            changed = replace(policy, zero=zero)
            yield f"zero {policy.zero} → {zero}", replace(choice, memory_policy=changed)
    if task.cluster.device.host_bandwidth and not policy.optimizer_offload:
        changed = replace(policy, optimizer_offload=1.0)
        yield "optimizer states on the host", replace(choice, memory_policy=changed)


def _graphs_allowed(choice: LayoutChoice, model: ModelNeeds) -> bool:
    """Return whether a run file with a layout's graphs is legal."""
    policy = choice.memory_policy
    if choice.graphs == "none":
        return True
    offload = policy.offload | policy.disk or policy.optimizer_offload
    if offload or choice.recipe in INPUT_CODE_BYTES:
        return False
    max_rows = {"max_rows": choice.max_rows} if choice.max_rows else {}
    layout = Layout.model_validate(
        {
            "sizes": choice.sizes.text, "graphs": choice.graphs, "zero": policy.zero,
            "schedule": choice.schedule, "dispatch": {"kind": choice.dispatch, **max_rows},
        }
    )  # fmt: skip
    return all(v.path not in (("graphs",), ("zero",)) for v in layout.violations(model))
