"""A plan as JSON, and as a self-contained HTML page that needs no network or library."""

import html
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from moefold.mesh.grid import Grid
from moefold.mesh.pipeline import StagePart
from moefold.planner.case import load_with_clones
from moefold.planner.goodput import scaling_curve
from moefold.planner.memoize import memoize
from moefold.planner.memory import estimate_memory, rank_totals, with_fewest_micro_batches
from moefold.planner.plan import GB, Plan, PlannedLayout
from moefold.planner.shortfall import Shortfall
from moefold.planner.time import estimate_time
from moefold.schedule.simulate import Span, StageCosts, simulate
from moefold.schedule.table import Pair, actions_of

TEMPLATE = Path(__file__).with_suffix(".html")
SHOWN_LOADS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Rows of the fullest expert rank over the mean for which sensitivity is shown."""
MAX_CELLS = 24
"""Most ranks along one side of a drawn grid; the rest is left out."""
MAX_SPANS = 2600
"""Most actions of a drawn timeline; of longer steps the beginning is shown."""
MAX_ACTIONS = 500
"""Most points of a line of memory; of several actions the peak is shown."""
SCALINGS: tuple[Literal["strong", "weak"], ...] = ("strong", "weak")
EXCHANGE_PARTS = ("tp", "cp", "dispatch", "offload")


def plan_json(plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Return a plan as JSON data. Times are in seconds, memory in GB."""
    task = plan.task
    best = plan.best
    cluster = task.cluster
    device = task.cluster.device
    software = task.software
    goodput = plan.expected_goodput
    return {
        "run": task.name,
        "cluster": {
            "device": device.name,
            "devices": cluster.devices,
            "memory": device.size,
            "memory_gb": device.memory_bytes / GB,
            "domain": cluster.domain,
            "per_node": cluster.per_node,
            "connections": cluster.connections,
            "link_gb_s": device.link_bandwidth / GB,
            "network_gb_s": device.nic_bandwidth / GB,
        },
        "inputs": {
            "batch": task.batch,
            "seq": task.seq,
            "load": task.load,
            "stack": f"{software.stack} {software.release}".strip(),
            "cuda_graphs": plan.graphs,
            "host_speed": software.host_speed,
            "multi_token": task.multi_token,
        },
        "assumed": list(task.assumptions),
        "given": _layout_json(plan.given) if plan.given else None,
        "given_problem": plan.given_problem,
        "best": _layout_json(best) if best else None,
        "layouts": list(map(_layout_json, plan.layouts)),
        "today": _layout_json(plan.trainable) if plan.trainable else None,
        "today_problem": plan.trainable_problem,
        "same_format": list(map(_layout_json, plan.same_format)),
        "published": list(map(_layout_json, plan.published)),
        "changes": [
            {
                "what": change.description, "faster": change.saved_share,
                "saved_gb": change.saved_bytes / GB, "fits": change.fits,
            }
            for change in plan.changes
        ],
        "run_file": plan.run_file,
        "goodput": {
            "ettr": goodput.ettr,
            "save_every_s": finite_or_none(goodput.save_interval_s),
            "hours_between_failures": finite_or_none(goodput.mtbf_s / 3600),
            "lost": goodput.lost_shares,
            **vars(plan.faults),
        },
        "nothing_fits": _shortfall_json(plan.shortfall) if plan.shortfall else None,
        "whole_run": vars(plan.cost(best, tokens)) if best and tokens and goodput.ettr else None,
    }  # fmt: skip


def _shortfall_json(shortfall: Shortfall) -> dict[str, Any]:
    """Return what is missing, and what would make it fit; sizes are in GB."""
    least = shortfall.least
    return {
        "limit_gb": shortfall.limit_bytes / GB,
        "least_gb": least.peak_bytes / GB if least else None,
        "least_layout": _layout_json(PlannedLayout(least.case, "search")) if least else None,
        "parts_gb": {name: size / GB for name, size in shortfall.parts},
        "fits_with": [
            {
                "change": remedy.change,
                "memory_gb": remedy.found.peak_bytes / GB,
                "layout": _layout_json(PlannedLayout(remedy.found.case, "search")),
            }
            for remedy in shortfall.remedies
        ],
        "tried": list(shortfall.tried),
    }


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON: None instead of infinity."""
    return value if value < float("inf") else None


FIGURES = (
    "layout", "policies", "step_time_s", "tflops_per_gpu", "tokens_per_s", "memory_gb", "margin_gb",
    "fits", "sure", "binds", "source", "published_tflops",
)  # fmt: skip
"""Properties of a layout that JSON has under the names of :class:`PlannedLayout`."""


def _layout_json(layout: PlannedLayout) -> dict[str, Any]:
    case = layout.case
    record = case.layout
    state = record.state
    time = layout.time
    memory = layout.memory
    (to_host, _), (to_disk, _) = case.offload.tiers
    return {
        **{name: getattr(layout, name) for name in FIGURES},
        "sizes": {**dict(case.sizes), "dp": case.folding.dp, "edp": case.folding.edp},
        "micro_batch": case.micro_batch,
        "micro_batches": case.num_micro_batches,
        "schedule": case.schedule.name,
        "stages": case.stages.text,
        "precision": layout.recipe,
        "dispatch": case.dispatch,
        "max_rows": case.fixed_dispatch.max_rows if case.fixed_dispatch else None,
        "clones": case.clones,
        "graphs": record.graphs,
        "zero": record.zero,
        "recompute": sorted(case.recompute),
        "offload": sorted(to_host),
        "disk": sorted(to_disk),
        "away_gb": {name: size / GB for name, size in memory.offloaded_activations.items()},
        "optimizer_offload": state.offloaded_share,
        "state_step": layout.state_step,
        "uncertainty": time.uncertainty,
        "not_yet": list(layout.unsupported),
        "fullest_rank": memory.rank,
        "memory_parts_gb": {name: size / GB for name, size in memory.parts.items()},
        "elsewhere_gb": {name: size / GB for name, size in memory.offloaded_state.items()},
        "time_parts_s": dict(time.parts),
        "hidden_s": dict(time.hidden),
    }


# ----------------------------------------------------------------------------- for the page


def render_page(plan: Plan, tokens: float | None) -> str:
    """Return the HTML page of a plan.

    Args:
        plan: the plan.
        tokens: tokens of the whole run, for days, cost and energy; None shows none of them.
    """
    data = page_data(plan, tokens)
    return _page(data["title"], data, None)


def render_form(form: dict[str, Any]) -> str:
    """Return the HTML page of :mod:`moefold.planner.serve`, whose form asks for plans.

    Args:
        form: the fields with the texts with which they begin.
    """
    return _page("moefold plan", None, form)


def _page(title: str, plan: dict[str, Any] | None, form: dict[str, Any] | None) -> str:
    text = TEMPLATE.read_text(encoding="utf-8").replace("__TITLE__", html.escape(title))
    packed = json.dumps({"plan": plan, "form": form}, separators=(",", ":"), allow_nan=False)
    # Data inside a script element must not contain the end of that element or begin a comment.
    return text.replace("__DATA__", packed.replace("<", "\\u003c"))


ROWS = ("given", "today", "layouts", "same_format", "published")
"""Parts of a plan's JSON data with the layouts of the page's table."""


def page_data(plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Return the plan as JSON data, with data to draw its main layouts and their scaling."""
    recommended = plan.recommended
    scaling = None
    layouts = {"given": plan.given}
    if plan.trainable and plan.trainable not in (plan.given, plan.best):
        layouts["fastest today"] = plan.trainable
    layouts["fastest"] = plan.best
    if recommended is not None:
        scaling = {
            kind: [
                vars(point) | {"save_every_s": finite_or_none(point.save_every_s)}
                for point in scaling_curve(plan.task, recommended.case, kind, plan.faults)
            ]
            for kind in SCALINGS
        }
    details = {name: _layout_details(layout) for name, layout in layouts.items() if layout}
    data = plan_json(plan, tokens)
    shown = (plan.given, plan.trainable, plan.layouts, plan.same_format, plan.published)
    for name, found in zip(ROWS, shown, strict=True):
        rows = found if isinstance(found, tuple) else filter(None, [found])
        filled = [_layout_json(layout) | _fragment(plan, layout) for layout in rows]
        data[name] = filled if isinstance(found, tuple) else next(iter(filled), None)
    task = plan.task
    return {
        **data,
        "title": f"{task.name} on {task.cluster.devices:,} {task.cluster.device.name}",
        "complete": plan.complete,
        "close": details,
        "scaling": scaling,
    }


def _fragment(plan: Plan, layout: PlannedLayout) -> dict[str, str]:
    """Return a layout as a run file fragment in YAML, or why there is none."""
    try:
        return {"fragment": yaml.safe_dump(plan.fragment(layout), sort_keys=False).rstrip()}
    except ValueError as error:
        return {"no_fragment": str(error)}


# Served plans of one search share most of their layouts.
@memoize(32)
def _layout_details(layout: PlannedLayout) -> dict[str, Any]:
    """Return a layout's JSON data with that of its drawings."""
    case = layout.case
    folding = layout.case.folding
    imbalance = []
    for load in SHOWN_LOADS:
        loaded = replace(case, load=load_with_clones(load, case.clones))
        peak = max(rank_totals(loaded))
        imbalance.append(
            {
                "load": load,
                "step_time_s": estimate_time(loaded).seconds,
                "memory_gb": peak / GB,
                "fits": peak <= case.cluster.device.memory_bytes,
            }
        )
    return {
        **_layout_json(layout),
        "capacity_gb": layout.device_memory_gb,
        "walls": {
            name: seconds / layout.step_time_s
            for name, seconds in layout.time.seconds_by_bottleneck.items()
        },
        "grids": {
            "attention": _grid(folding.attention, ("tp", "cp", "dp", "pp")),
            "experts": _grid(folding.experts, ("etp", "ep", "edp", "pp")),
        },
        "held": [[_chunk_label(chunk) for chunk in rank] for rank in case.contents.parts],
        "memory_ranks": [
            {name: value / GB for name, value in rank.parts.items()}
            for rank in estimate_memory(with_fewest_micro_batches(case))
        ],
        "memory_line": _memory_line(layout),
        "timeline": _timeline(layout),
        "imbalance": imbalance,
    }


def _grid(grid: Grid, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return a grid as drawn: the last axis downwards, the others to the right."""
    sizes = [grid.sizes[axis] for axis in axes]
    shown = []
    cells = MAX_CELLS
    for size in sizes[:3]:
        shown.append(min(size, cells))
        cells = max(1, cells // shown[-1])
    shown.append(min(sizes[3], MAX_CELLS))
    columns = [tuple(reversed(column)) for column in product(*map(range, reversed(shown[:3])))]
    ranks = [
        [grid.rank(dict(zip(axes, (*column, row), strict=True))) for column in columns]
        for row in range(shown[3])
    ]
    return {"axes": list(axes), "sizes": sizes, "kept": shown, "ranks": ranks}


def _chunk_label(chunk: tuple[StagePart, ...]) -> str:
    kinds = [part.kind for part in chunk]
    layers = [part.index for part in chunk if part.kind == "layer"]
    names = ["embedding"] if "embedding" in kinds else []
    if layers:
        many = len(layers) > 1
        names.append(f"layers {layers[0]}–{layers[-1]}" if many else f"layer {layers[0]}")
    names += ["multi-token"] if "multi_token" in kinds else []
    names += ["head, loss"] if "loss" in kinds else []
    return ", ".join(names) or "nothing"


def _memory_line(layout: PlannedLayout) -> list[list[Any]]:
    """Return the fullest rank's memory during the step: label and GB of each part, per action."""
    actions = layout.memory.actions
    step = max(1, -(-len(actions) // MAX_ACTIONS))
    groups = (actions[start : start + step] for start in range(0, len(actions), step))
    line = []
    for group in groups:
        peak = max(group, key=lambda action: action.total)
        sizes = peak.activations, peak.operands, peak.temporaries, peak.gradients
        line.append([peak.label, *(round(size / GB, 3) for size in sizes)])
    return line


def _timeline(layout: PlannedLayout) -> dict[str, Any]:
    """Return the timeline of all pipeline ranks, for a step with few micro-batches."""
    case = layout.case
    time = layout.time
    pp = case.sizes.pp
    vpp = case.sizes.vpp
    drawn = min(case.num_micro_batches, max(3 * pp, 4))
    if any(case.schedule.violations(pp, vpp, drawn)):
        drawn = case.num_micro_batches
    table = replace(case, batch=case.folding.dp * case.micro_batch * drawn).table
    slowest = max(map(sum, time.ranks))
    exchanges = sum(time.parts.get(part, 0.0) for part in EXCHANGE_PARTS) / case.num_micro_batches
    passes = (time.ranks[table.rank_of(stage)] for stage in range(table.stages))
    costs = [StageCosts(ahead / vpp, back / vpp / 2, back / vpp / 2) for ahead, back in passes]
    simulated = simulate(table, costs)
    max_spans = MAX_SPANS // max(1, len(simulated.spans))
    # Activations and gradients that are sent to another rank.
    actions = ((rank, action) for rank in range(table.ranks) for action in table.actions(rank))
    results = ((rank, table.action_result(rank, action)) for rank, action in actions)
    readers = ((rank, table.reader_rank(result)) for rank, result in results if result)
    transfers = sum(reader is not None and reader != rank for rank, reader in readers)
    return {
        "spans": [[_timeline_entry(span) for span in line[:max_spans]] for line in simulated.spans],
        "micro_batches": drawn,
        "of": case.num_micro_batches,
        "length": simulated.makespan,
        "exchange_share": min(0.9, exchanges / slowest) if slowest else 0.0,
        "idle": 1 - sum(simulated.busy) / (simulated.makespan * len(simulated.busy)),
        "transfers": transfers,
    }


def _timeline_entry(span: Span) -> list[Any]:
    """Return an action of the timeline: its text, kind (P for a pair), chunk, start and end."""
    step = span.step
    kind = "P" if isinstance(step, Pair) else step.kind
    return [str(step), kind, actions_of(step)[0].chunk, round(span.start, 5), round(span.end, 5)]
