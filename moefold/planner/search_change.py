"""Suggested changes to a layout: all single changes, with their planned time and memory."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from moefold.mesh.config import AXES, Sizes
from moefold.mesh.legality import size_rules
from moefold.parallel.config import Layout
from moefold.planner.case import Case, Recipe
from moefold.planner.layouts import OptimizerOnHost, dispatch_kind, make_dispatch, make_recompute
from moefold.planner.memory import rank_totals
from moefold.planner.memory_saved import INPUT_CODE_BYTES
from moefold.planner.recompute import MEMORY_RESERVE
from moefold.planner.search_space import SCHEDULES, full_space
from moefold.planner.task import TrainingTask
from moefold.planner.time import estimate_time
from moefold.spec.decoder import ModelNeeds, model_needs

GRAPHS: tuple[Literal["none", "partial", "step"], ...] = ("none", "partial", "step")
MAX_CHANGES = 5
"""Most changes that are returned."""


@dataclass(frozen=True)
class LayoutChange:
    """One change of a layout with its effect."""

    description: str
    case: Case
    """The changed step."""
    saved_share: float
    """Seconds saved over seconds of the step; negative if it is slower."""
    saved_bytes: float
    """Bytes saved on the fullest device; negative if it needs more."""
    fits: bool


class ChangedLayout(NamedTuple):
    """A layout with what a task needs besides to be planned in it."""

    layout: Layout
    micro_batch: int
    recipe: Recipe

    def relaid(self, **update: Any) -> "ChangedLayout":
        """Return it with changed fields of the layout."""
        return self._replace(layout=self.layout.model_copy(update=update))


def suggest_changes(
    task: TrainingTask, case: Case, further: Iterable[tuple[str, ChangedLayout]] = ()
) -> tuple[LayoutChange, ...]:
    """Return the most useful single changes to the layout of a task's case.

    ``further``: changes to try besides, with their descriptions.

    If the layout fits, these are changes that fit and are faster, the fastest first; otherwise
    changes that make it fit, the fastest first, or else those that save most memory.
    """
    memory = task.cluster.device.memory_bytes
    seconds = estimate_time(case).seconds
    peak = max(rank_totals(case))
    limit = memory * (1 - MEMORY_RESERVE) if peak <= memory * (1 - MEMORY_RESERVE) else memory
    timed = list[tuple[float, str, Case]]()
    for description, changed in chain(_single_changes(task, case), further):
        with suppress(ValueError):
            changed_case = task.case(*changed)
            timed.append((estimate_time(changed_case).seconds, description, changed_case))
    timed.sort(key=lambda entry: entry[0])
    fits = peak <= limit
    changes = list[LayoutChange]()
    for changed_seconds, description, changed_case in timed:
        if fits and (changed_seconds >= seconds or len(changes) == MAX_CHANGES):
            break
        changed_peak = max(rank_totals(changed_case))
        saved_share = 1 - changed_seconds / seconds
        saved_bytes = peak - changed_peak
        if changed_peak <= limit if fits else saved_bytes > 0:
            now_fits = changed_peak <= limit
            changes.append(
                LayoutChange(description, changed_case, saved_share, saved_bytes, now_fits)
            )
    if not fits:
        fitting = [change for change in changes if change.fits]
        changes = fitting or sorted(changes, key=lambda change: -change.saved_bytes)
    return tuple(changes[:MAX_CHANGES])


def _single_changes(task: TrainingTask, case: Case) -> Iterator[tuple[str, ChangedLayout]]:
    """Yield all changes of one policy, or of one size by a factor of two, with descriptions."""
    space = full_space(task)
    layout = case.layout
    model = model_needs(task.decoder, task.seq)
    given = ChangedLayout(layout, case.micro_batch, case.number_formats.recipe)
    # The default schedule depends on vpp, which is one of the changes.
    balanced = given.relaid(stages=None, schedule=case.schedule)
    for axis in AXES:
        current = getattr(case.sizes, axis)
        for size in (2 * current, current // 2):
            sizes = Sizes(**{**dict(case.sizes), axis: max(1, size)})
            legal = not size_rules(sizes, model, model.layers)
            if size and legal and task.cluster.devices % sizes.smallest_world == 0:
                yield f"{axis} {current} → {size}", balanced.relaid(sizes=sizes.text)
    for schedule in SCHEDULES:
        if schedule.name != case.schedule.name:
            yield f"schedule {schedule.name}", balanced.relaid(schedule=schedule)
    for kind in space.dispatchers if case.sizes.ep > 1 else ():
        if kind != dispatch_kind(layout):
            node = case.sizes.ep // case.num_expert_domains
            yield f"dispatch {kind}", given.relaid(dispatch=make_dispatch(kind, node))
    for graphs in GRAPHS if task.software.stack == "moefold" else ():
        changed = given.relaid(graphs=graphs)
        if graphs != layout.graphs and _graphs_allowed(changed, model):
            yield f"graphs {graphs}", changed
    for size in (case.micro_batch * 2, case.micro_batch // 2):
        if size:
            yield f"micro_batch {case.micro_batch} → {size}", given._replace(micro_batch=size)
    for modules in space.recomputes:
        if modules != case.recompute:
            names = " + ".join(sorted(modules)) or "nothing"
            yield f"recompute {names}", given.relaid(recompute=make_recompute(modules))
    for recipe in space.recipes:
        if recipe != given.recipe:
            yield f"precision {recipe}", given._replace(recipe=recipe)
    # The time of ZeRO 3 in a pipeline is known of moefold only.
    stages = (1, 2, 3) if task.software.stack == "moefold" or case.sizes.pp == 1 else (1, 2)
    for zero in stages:
        if zero != layout.zero:
            yield f"zero {layout.zero} → {zero}", given.relaid(zero=zero)
    if task.cluster.device.host_bandwidth and not layout.state.is_offloaded:
        yield "optimizer states on the host", given.relaid(state=OptimizerOnHost())


def _graphs_allowed(candidate: ChangedLayout, model: ModelNeeds) -> bool:
    """Return whether a run file with a layout's graphs is legal."""
    layout = candidate.layout
    if layout.graphs == "none":
        return True
    if candidate.recipe in INPUT_CODE_BYTES:
        return False
    return all(v.path not in (("graphs",), ("zero",)) for v in layout.violations(model))
