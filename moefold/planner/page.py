"""A plan as JSON, and as a self-contained HTML page that needs no network or library."""

import html
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from moefold.mesh.grid import Grid
from moefold.planner.case import load_with_clones
from moefold.planner.goodput import scaling_curve
from moefold.planner.memory import estimate_memory, rank_totals, with_fewest_micro_batches
from moefold.planner.plan import GB, Plan, PlannedLayout
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
MAX_MOMENTS = 500
SCALINGS: tuple[Literal["strong", "weak"], ...] = ("strong", "weak")
EXCHANGE_PARTS = ("tp", "cp", "dispatch", "offload")


def plan_json(plan: Plan, tokens: float) -> dict[str, Any]:
    """Return a plan as JSON data. Times are in seconds, memory in GB."""
    task, best = plan.task, plan.best
    cluster, device, software = task.cluster, task.cluster.device, task.software
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
        "whole_run": vars(plan.cost(best, tokens)) if best and goodput.ettr else None,
    }  # fmt: skip


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON: None instead of infinity."""
    return value if value < float("inf") else None


FIGURES = (
    "layout", "policies", "step_time_s", "tflops_per_gpu", "tokens_per_s", "memory_gb", "margin_gb",
    "fits", "sure", "binds", "source", "published_tflops",
)  # fmt: skip
"""Properties of a layout that JSON has under the names of :class:`PlannedLayout`."""


def _layout_json(one: PlannedLayout) -> dict[str, Any]:
    case, choice, keeping, took = one.case, one.choice, one.choice.memory_policy, one.time
    return {
        **{name: getattr(one, name) for name in FIGURES},
        "sizes": {**dict(choice.sizes), "dp": case.folding.dp, "edp": case.folding.edp},
        "micro_batch": choice.micro_batch,
        "micro_batches": case.num_micro_batches,
        "schedule": choice.schedule.name,
        "stages": case.stages.text,
        "precision": choice.recipe,
        "dispatch": case.dispatch,
        "max_rows": choice.max_rows,
        "clones": choice.clones,
        "graphs": choice.graphs,
        "zero": keeping.zero,
        "recompute": sorted(keeping.recompute),
        "offload": sorted(keeping.offload),
        "disk": sorted(keeping.disk),
        "away_gb": {name: value / GB for name, value in one.memory.offloaded_activations.items()},
        "optimizer_offload": keeping.optimizer_offload,
        "state_step": keeping.state_step,
        "uncertainty": took.uncertainty,
        "not_yet": list(one.unsupported),
        "fullest_rank": one.memory.rank,
        "memory_parts_gb": {name: value / GB for name, value in one.memory.parts.items()},
        "elsewhere_gb": {name: value / GB for name, value in one.memory.offloaded_state.items()},
        "time_parts_s": dict(took.parts),
        "hidden_s": dict(took.hidden),
    }


# ----------------------------------------------------------------------------- for the page


def render_page(plan: Plan, tokens: float) -> str:
    """Return the HTML page.

    Args:
        plan: the plan.
        tokens: tokens of the whole run, for days, cost and energy.
    """
    data = page_data(plan, tokens)
    # Data inside a script element must not contain the end of that element or begin a comment.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    task, device = plan.task, plan.task.cluster.device.name
    title = f"{task.name} on {task.cluster.devices:,} {device}"
    text = TEMPLATE.read_text(encoding="utf-8").replace("__TITLE__", html.escape(title))
    return text.replace("__DATA__", packed)


def page_data(plan: Plan, tokens: float) -> dict[str, Any]:
    """Return the facts and the data of the page's drawings of the given and the best layout."""
    best, scaling = plan.best, None
    close = {"given": plan.given, "fastest": best}
    if plan.trainable and plan.trainable.choice not in [
        one.choice for one in close.values() if one
    ]:
        close["fastest today"] = plan.trainable
    if best is not None:
        curves = {
            kind: scaling_curve(plan.task, best.choice, kind, plan.faults) for kind in SCALINGS
        }
        scaling = {
            kind: [vars(p) | {"save_every_s": finite_or_none(p.save_every_s)} for p in points]
            for kind, points in curves.items()
        }
    return plan_json(plan, tokens) | {
        "close": {name: _layout_details(one) for name, one in close.items() if one},
        "scaling": scaling,
    }


def _layout_details(one: PlannedLayout) -> dict[str, Any]:
    case = one.case
    folding, imbalance = case.folding, []
    for load in SHOWN_LOADS:
        other = replace(case, load=load_with_clones(load, case.clones))
        needed = max(rank_totals(other))
        imbalance.append(
            {
                "load": load,
                "step_time_s": estimate_time(other).seconds,
                "memory_gb": needed / GB,
                "fits": needed <= case.cluster.device.memory_bytes,
            }
        )
    return {
        **_layout_json(one),
        "capacity_gb": one.device_memory_gb,
        "walls": {
            wall: took / one.step_time_s for wall, took in one.time.seconds_by_bottleneck.items()
        },
        "grids": {
            "attention": _grid(folding.attention, ("tp", "cp", "dp", "pp")),
            "experts": _grid(folding.experts, ("etp", "ep", "edp", "pp")),
        },
        "held": [[_chunk_label(chunk) for chunk in rank] for rank in case.stage_parts],
        "memory_ranks": [
            {name: value / GB for name, value in rank.parts.items()}
            for rank in estimate_memory(with_fewest_micro_batches(case))
        ],
        "memory_line": _memory_line(one),
        "timeline": _timeline(one),
        "imbalance": imbalance,
    }


def _grid(grid: Grid, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return a grid as drawn: the last axis downwards, the others to the right."""
    sizes = [grid.sizes[axis] for axis in axes]
    kept, room = [], MAX_CELLS
    for size in sizes[:3]:
        kept.append(min(size, room))
        room = max(1, room // kept[-1])
    kept.append(min(sizes[3], MAX_CELLS))
    columns = [tuple(reversed(at)) for at in product(*map(range, reversed(kept[:3])))]
    ranks = [
        [grid.rank(dict(zip(axes, (*at, row), strict=True))) for at in columns]
        for row in range(kept[3])
    ]
    return {"axes": list(axes), "sizes": sizes, "kept": kept, "ranks": ranks}


def _chunk_label(chunk: Any) -> str:
    kinds = [place.kind for place in chunk]
    layers = [place.index for place in chunk if place.kind == "layer"]
    said = ["embedding"] if "embedding" in kinds else []
    if layers:
        said.append(f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    said += ["multi-token"] if "multi_token" in kinds else []
    return ", ".join([*said, *(["head, loss"] if "loss" in kinds else [])]) or "nothing"


def _memory_line(one: PlannedLayout) -> list[list[Any]]:
    """Return the fullest rank's memory during the step: label and GB of each part, per action."""
    moments = one.memory.actions
    step = max(1, -(-len(moments) // MAX_MOMENTS))
    kept = [max(moments[i : i + step], key=lambda m: m.total) for i in range(0, len(moments), step)]
    return [
        [
            m.label,
            *(round(v / GB, 3) for v in (m.activations, m.operands, m.temporaries, m.gradients)),
        ]
        for m in kept
    ]


def _timeline(one: PlannedLayout) -> dict[str, Any]:
    """Return the timeline of all pipeline ranks, for a step with few micro-batches."""
    case, vpp = one.case, one.case.sizes.vpp
    short = min(case.num_micro_batches, max(3 * case.sizes.pp, 4))
    if any(case.schedule.violations(case.sizes.pp, vpp, short)):
        short = case.num_micro_batches
    table = replace(case, batch=case.folding.dp * case.micro_batch * short).table
    slow = max(sum(span) for span in one.time.ranks)
    sent = sum(one.time.parts.get(name, 0.0) for name in EXCHANGE_PARTS) / case.num_micro_batches
    homes = (one.time.ranks[table.rank_of(stage)] for stage in range(table.stages))
    costs = [StageCosts(ahead / vpp, back / vpp / 2, back / vpp / 2) for ahead, back in homes]
    made = simulate(table, costs)
    most = MAX_SPANS // max(1, len(made.spans))
    # Activations and gradients that are sent to another rank.
    actions = ((rank, action) for rank in range(table.ranks) for action in table.actions(rank))
    results = ((rank, table.action_result(rank, action)) for rank, action in actions)
    readers = ((rank, table.reader_rank(result)) for rank, result in results if result)
    transfers = sum(reader is not None and reader != rank for rank, reader in readers)
    return {
        "spans": [[_timeline_entry(one) for one in line[:most]] for line in made.spans],
        "micro_batches": short,
        "of": case.num_micro_batches,
        "length": made.makespan,
        "exchange_share": min(0.9, sent / slow) if slow else 0.0,
        "idle": 1 - sum(made.busy) / (made.makespan * len(made.busy)),
        "transfers": transfers,
    }


def _timeline_entry(span: Span) -> list[Any]:
    """Return an action of the timeline: its text, kind (P for a pair), chunk, start and end."""
    step = span.step
    kind = "P" if isinstance(step, Pair) else step.kind
    return [str(step), kind, actions_of(step)[0].chunk, round(span.start, 5), round(span.end, 5)]
