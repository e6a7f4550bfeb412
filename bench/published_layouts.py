"""Writes ``moefold/planner/published_layouts.json``: the fastest published layout of each model and
length on each number of each device, which plans show beside what the search finds.

    python bench/published_layouts.py
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planning.rows import Row, read

FILE = Path(__file__).parents[1] / "moefold" / "planner" / "published_layouts.json"


def entry(row: Row) -> dict[str, Any]:
    """Return a row's layout as a plan reads it."""
    case = row.case
    found = {
        "id": row.id,
        "source": row.raw["source"],
        "model": row.raw["model"],
        "device": case.cluster.device.name,
        "devices": case.world,
        "seq": case.seq,
        "batch": case.batch,
        "micro_batch": case.micro_batch,
        "sizes": case.sizes.text,
        "stages": case.stages.text,
        "schedule": type(case.schedule).model_fields["kind"].default,
        "dispatch": case.dispatch,
        "recompute": sorted(case.recompute),
        "zero": case.layout.zero,
        "recipe": case.number_formats.recipe,
        "multi_token": case.multi_token,
    }
    rate = row.raw.get("tflops_per_gpu")
    return found | ({"tflops_per_gpu": rate} if rate else {})


def fastest(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the fastest row's entry for each model and length on each number of each device."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.planned is None or row.raw.get("status") == "OOM":
            continue
        found = entry(row)
        key = (found["model"], found["device"], found["devices"], found["seq"])
        if key not in best or _rank(found) > _rank(best[key]):
            best[key] = found
    return [best[key] for key in sorted(best)]


def main() -> None:
    """Write the file."""
    rows = fastest(read())
    FILE.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} layouts in {FILE}")


def _rank(found: dict[str, Any]) -> float:
    return found.get("tflops_per_gpu", 0.0)


if __name__ == "__main__":
    main()
