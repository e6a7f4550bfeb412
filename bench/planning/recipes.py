"""What the published recipe of a row says where the row itself does not.

``bench/data/published_recipes.json`` holds what Megatron-Bridge's performance recipes set, release
by release (tag and file stand beside each): ``scripts/performance/configs`` up to 26.06 and
``src/megatron/bridge/perf_recipes`` from 26.08. Layouts are tp, cp, pp, vpp, ep, micro-batch.

Which recipe a row is, a rule that was written before any row was scored with it: that of the row's
model, device, format and release; a release without recipes takes the next release's that has some.
Of these those with the row's layout, else all; and where they differ in a setting, it is not said.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "published_recipes.json"
FORMATS = {
    "bf16": ("BF16",),
    "fp8_block": ("FP8_SC", "FP8_CS"),
    "fp8_tensor": ("FP8_CS",),
    "mxfp8": ("FP8_MX",),
    "nvfp4": ("NVFP4",),
}
"""The planner's formats as the recipes call them, the first that there is."""
LAYOUT = ("tp", "cp", "pp", "vpp", "ep", "mbs")


@cache
def recipes() -> tuple[dict[str, Any], ...]:
    """Return every recipe."""
    return tuple(json.loads(FILE.read_text("utf-8")))


def said(row: dict[str, Any], release: str, format: str, setting: str) -> Any:
    """Return what a row's recipe sets, or None where there is none or recipes differ.

    Args:
        release: of Megatron-Bridge; one that is no number has no recipes.
        format: the planner's name of what products are computed in.
        setting: a key of the file.
    """
    if not release[:2].isdigit():
        return None
    values = [one[setting] for one in _of(row, release, format) if setting in one]
    return values[0] if values and all(value == values[0] for value in values) else None


def _of(row: dict[str, Any], release: str, format: str) -> list[dict[str, Any]]:
    """Return the recipes that may be a row's."""
    mine = [one for one in recipes() if (one["model"], one["gpu"]) == (row["model"], row["gpu"])]
    for name in FORMATS[format]:
        same = [one for one in mine if one["precision"] == name]
        later = [r for one in same for r in one["releases"] if r >= release]
        if not later:
            continue
        current = [one for one in same if min(later) in one["releases"]]
        layout = [row.get(key) or 1 for key in LAYOUT]
        return [one for one in current if one["layout"] == layout] or current
    return []
