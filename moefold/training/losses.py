"""What a run lost to faults, and how often it should have saved: read from its folder."""

from statistics import median
from typing import Any

import numpy as np

from moefold.planner.goodput import best_interval
from moefold.training.history import History

PARTS = ("restart_s", "load_s", "lost_s")
"""From the notice of a loss to the new meeting; to the first step; steps that were made again."""


def losses(history: History, wall_s: float) -> dict[str, Any]:
    """Return restarts, recoveries in place, steps made again, and the seconds of each part.

    ``save_every_s`` is the interval between checkpoints that would lose least with the faults of
    this run and the stall that its own saves had; it is absent where neither is known.

    Args:
        history: the run's.
        wall_s: from its first start to its newest sign of life.
    """
    starts = [event for event in history.events if event.get("event") == "start"]
    lived = [start for start in starts if "recovered" in start]
    step_s = _median(history.curve("step_time_s").values.tolist())
    parts, lost = dict.fromkeys(PARTS, 0.0), 0
    for start in lived:
        told = start["recovered"]
        again = max(0, told.get("reached", start["step"]) - start["step"])
        lost += max(1, again)
        parts["restart_s"] += told["restart_s"]
        parts["load_s"] += told["load_s"]
        parts["lost_s"] += told.get("under_way_s", 0.0) + again * step_s
    out: dict[str, Any] = {
        "restarts": len(starts) - 1 - len(lived),
        "recoveries": len(lived),
        "lost_steps": lost,
        "lost_s": parts,
    }
    stalls = [event["stall_s"] for event in history.events if event.get("event") == "saved"]
    if stalls and len(starts) > 1 and wall_s > 0:
        out["save_every_s"] = best_interval(_median(stalls), (len(starts) - 1) / wall_s)
    return out


def _median(values: list[float]) -> float:
    kept = [value for value in values if np.isfinite(value)]
    return median(kept) if kept else 0.0
