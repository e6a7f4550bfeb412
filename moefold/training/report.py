"""A run's history as one self-contained HTML page: curves, expert load, downtime and goodput."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from moefold.planner.goodput import optimal_save_interval
from moefold.planner.walls import WALLS
from moefold.training.formatting import clock, count
from moefold.training.run_folder import CROSS_ENTROPY, Curve, History, evenly_spaced, held_out_sets

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_POINTS = 1200
"""Maximum number of points of a curve; longer ones are averaged in groups."""
MAX_CHECKS = 300
"""Maximum number of columns of a heat map."""
BASELINES = {"bigram": "bigram table", "xz": "xz -9e"}
LAYER_CURVES = {
    "load_max_over_mean": "Busiest expert, load over the mean",
    "dead_experts": "Experts without tokens",
    "load_entropy": "Entropy of the expert load (1 = uniform)",
    "probability_entropy": "Entropy of router probabilities (1 = uniform)",
    "drop_rate": "Share of routing choices dropped",
    "bias_range": "Selection bias, maximum minus minimum",
}
DOWNTIME_PARTS = ("restart_s", "load_s", "lost_s")
"""Seconds from the notice of a loss to the rendezvous, from there to the start, of lost steps."""


def summary(history: History) -> dict[str, Any]:
    """Return key figures of a run: progress, losses, speed, downtime, alarms.

    ``goodput`` is the time inside the steps that count over the time from the first start to the
    newest event, downtime between processes included.
    """
    if not history.lines:
        raise ValueError("the folder has no metrics yet: metrics.jsonl is missing or empty")
    newest = history.lines[-1]
    out: dict[str, Any] = {"step": newest["step"], "tokens": newest.get("tokens")}
    for name, key in held_out_sets(history.keys()):
        curve = history.curve(key)
        out[key] = float(curve.values[-1])
        if np.isfinite(curve.values).any():
            out[f"best_step/{name}"] = int(curve.steps[np.nanargmin(curve.values)])
    for key in ("lm_loss", "val_loss"):
        curve = history.curve(key)
        if len(curve):
            out[key] = float(curve.values[-1])
    out["baselines"] = history.baselines
    for key in ("tokens_per_s", "mfu", "mfu_of_peak", "step_time_s"):
        values = history.curve(key).values
        if np.isfinite(values).any():
            out[f"median_{key}"] = float(np.nanmedian(values))
    times = history.curve("step_time_s").values
    starts = [e for e in history.events if e.get("event") == "start"]
    if starts and len(times):
        inside = float(np.nansum(times))
        last = max(e["time"] for e in history.events)
        out["wall_s"] = max(last - starts[0]["time"], inside)
        out["goodput"] = inside / out["wall_s"] if out["wall_s"] else None
        out |= downtime(history, out["wall_s"])
    out["alarms"] = int(np.nansum(history.curve("moe/alarms").values))
    return out


def downtime(history: History, wall_s: float) -> dict[str, Any]:
    """Return restarts, recoveries, repeated steps, and the seconds of each of ``DOWNTIME_PARTS``.

    ``save_every_s`` is the interval between checkpoints that would lose least time with this run's
    rate of faults and the stalls of its saves; absent unless both are known. ``wall_s`` is the
    time from the first start to the newest event.
    """
    starts = [event for event in history.events if event.get("event") == "start"]
    recoveries = [start for start in starts if "recovered" in start]
    times = history.curve("step_time_s").values
    step_s = float(np.nanmedian(times)) if np.isfinite(times).any() else 0.0
    parts = dict.fromkeys(DOWNTIME_PARTS, 0.0)
    lost_steps = 0
    for start in recoveries:
        recovered = start["recovered"]
        repeated_steps = max(0, recovered.get("reached", start["step"]) - start["step"])
        lost_steps += max(1, repeated_steps)
        parts["restart_s"] += recovered["restart_s"]
        parts["load_s"] += recovered["load_s"]
        parts["lost_s"] += recovered.get("under_way_s", 0.0) + repeated_steps * step_s
    out: dict[str, Any] = {
        "restarts": len(starts) - 1 - len(recoveries),
        "recoveries": len(recoveries),
        "lost_steps": lost_steps,
        "lost_s": parts,
    }
    stalls = [event["stall_s"] for event in history.events if event.get("event") == "saved"]
    if stalls and len(starts) > 1 and wall_s > 0:
        out["save_every_s"] = optimal_save_interval(median(stalls), (len(starts) - 1) / wall_s)
    return out


def render_report(
    history: History, title: str, subtitle: str, walls: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page; raises ``ValueError`` if the run has no metrics yet.

    ``walls``: what bounds the traced steps, in order.
    """
    cards = _cards(summary(history))
    for traced in walls[-1:]:
        share = traced["parts"][traced["wall"]] / traced["seconds"]
        cards.append([f"{share:.0%}", f"of step {traced['step']}: {WALLS[traced['wall']]}"])
    data = {"cards": cards, "charts": _charts(history), "heat": _heat_map(history)}
    return render_page(TEMPLATE, title, subtitle, data)


def render_page(template: Path, title: str, subtitle: str, data: dict[str, Any]) -> str:
    """Fill an HTML template's ``__TITLE__``, ``__SUBTITLE__`` and ``__DATA__`` (JSON)."""
    # JSON in a script element must contain neither its end tag nor the start of a comment.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = template.read_text(encoding="utf-8").replace("__TITLE__", html.escape(title))
    return text.replace("__SUBTITLE__", html.escape(subtitle)).replace("__DATA__", packed)


def _cards(facts: dict[str, Any]) -> list[list[str]]:
    """Return (figure, label) of each card."""
    cards = []
    for name, key in held_out_sets(facts):
        cards.append([f"{facts[key]:.3f}", f"bits per byte, {name}"])
    cards += [[f"{v:.2f}", f"{BASELINES.get(k, k)}"] for k, v in facts["baselines"].items()]
    cards.append([f"{facts['step']:,}", "steps"])
    if facts["tokens"]:
        cards.append([count(facts["tokens"]), "tokens"])
    if "median_tokens_per_s" in facts:
        cards.append([count(facts["median_tokens_per_s"]), "tokens per second (median)"])
    rates = {"median_mfu": "the measured rate", "median_mfu_of_peak": "the chip's peak"}
    for key, rate in rates.items():
        if key in facts:
            share = 100 * facts[key]
            percent = f"{share:.0f}" if share >= 1 else f"{share:.2g}"
            cards.append([f"{percent} %", f"model FLOPs utilisation, of {rate}"])
    if "goodput" in facts:
        cards.append([clock(facts["wall_s"]), "wall clock"])
        cards.append([f"{100 * facts['goodput']:.0f} %", "goodput: wall clock inside steps"])
        cards.append([str(facts["restarts"]), "restarts"])
        if facts["recoveries"]:
            spent = clock(sum(facts["lost_s"].values()))
            cards.append([str(facts["recoveries"]), f"recoveries after lost ranks, {spent} in all"])
            cards.append([str(facts["lost_steps"]), "steps repeated"])
        if "save_every_s" in facts:
            cards.append([clock(facts["save_every_s"]), "best interval between checkpoints"])
    cards.append([str(facts["alarms"]), "routing alarms"])
    return cards


def loss_chart(history: History) -> dict[str, Any]:
    """Return the loss chart: lines, training first, and baselines; in bits per byte if known."""
    factor = history.bits_per_byte_per_nat()
    train = history.curve("lm_loss")
    train = Curve(train.steps, train.values * (factor or 1.0))
    keys = held_out_sets(history.keys()) if factor else [("held out", "val_loss")]
    # Held-out text is measured by cross-entropy whatever the training loss, except for pairs.
    with_kind = history.loss != CROSS_ENTROPY and any(held_out_sets(history.keys()))
    lines = [_line(f"training ({history.loss})" if with_kind else "training", train, smooth=True)]
    lines += [_line(name, history.curve(key), dots=True) for name, key in keys]
    marks = [[BASELINES.get(k, k), v] for k, v in history.baselines.items()] if factor else []
    title = f"Loss, {loss_unit(history)}"
    return {"title": title, "lines": lines, "marks": marks, "wide": True}


def loss_unit(history: History) -> str:
    """Return the unit of the loss, in words."""
    if history.bits_per_byte_per_nat():
        return "bits per byte"
    pairs = any("preference/margin" in line for line in history.lines)
    return "per pair" if pairs else "nats per token"


def _charts(history: History) -> list[dict[str, Any]]:
    charts = [loss_chart(history)]
    scalar_titles = {
        "grad_norm": "Gradient norm",
        "lr": "Learning rate",
        "tokens_per_s": "Tokens per second",
        "mfu": "Model FLOPs utilisation",
    }
    for key, title in scalar_titles.items():
        line = _line(key, history.curve(key), smooth=key != "lr")
        charts.append({"title": title, "lines": [line]})
    keys = history.keys()
    for key in keys:
        if key.startswith("router/"):
            title = f"Router term: {key.removeprefix('router/')}"
            charts.append({"title": title, "lines": [_line(key, history.curve(key), smooth=True)]})
    for quantity, title in LAYER_CURVES.items():
        layer_keys = [k for k in keys if k.startswith("moe/") and k.endswith(f"/{quantity}")]
        lines = [_line(f"layer {k.split('/')[1]}", history.curve(k)) for k in layer_keys]
        # Zero dead experts is of interest; other quantities that are always zero are left out.
        if quantity == "dead_experts" or any(any(line["y"]) for line in lines):
            charts.append({"title": title, "lines": lines, "layers": True})
    charts = [{**c, "lines": [line for line in c["lines"] if line["x"]]} for c in charts]
    return [c for c in charts if c["lines"]]


def _line(name: str, curve: Curve, smooth: bool = False, dots: bool = False) -> dict[str, Any]:
    finite = np.isfinite(curve.values)
    curve = Curve(curve.steps[finite], curve.values[finite])
    steps, values = _downsample(curve.steps, curve.values)
    line: dict[str, Any] = {"name": name, "x": steps, "y": values, "dots": dots}
    if smooth and len(curve) > 20:
        line["smooth"] = _downsample(curve.steps, curve.smooth(len(curve) / 60))[1]
    return line


def encode_base64(array: np.ndarray) -> str:
    """Return an array's bytes in base64, for a page's script."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _downsample(steps: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Average groups of neighbours, so that at most ``MAX_POINTS`` are left."""
    size = -(-len(steps) // MAX_POINTS) or 1
    starts = np.arange(0, len(steps), size)
    if not len(starts):
        return [], []
    counts = np.diff(np.append(starts, len(steps)))
    mean = np.add.reduceat(values, starts) / counts
    ends = steps[np.minimum(starts + size - 1, len(steps) - 1)]
    return ends.tolist(), [float(f"{value:.6g}") for value in mean]


def _heat_map(history: History) -> dict[str, Any] | None:
    """Return the loads as bytes: 0 is no token, 64 a fair share, 255 four fair shares or more."""
    if (loads := history.load()) is None:
        return None
    steps, layers, load = loads
    load = load[evenly_spaced(steps)]
    size = -(-len(load) // MAX_CHECKS)
    groups = load[: len(load) // size * size].reshape(-1, size, *load.shape[1:])
    codes = np.clip(np.rint(np.nan_to_num(groups.mean(axis=1)) * 64), 0, 255).astype("u1")
    widths = [int(np.isfinite(load[-1, j]).sum()) for j in range(len(layers))]
    return {
        "steps": [int(steps[0]), int(steps[-1])],
        "layers": layers,
        "shape": list(codes.shape),
        "experts": widths,
        "codes": encode_base64(codes),
    }
