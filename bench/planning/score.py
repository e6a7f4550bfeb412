"""Scores of predictions: errors, ranks within sweeps, baselines, and the split into parts."""

import hashlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from planning.rows import Row, shape

from moefold.planner.curves import Constants
from moefold.planner.time import estimate_time

HELD_OUT_OF = 5
"""One layout in so many is held out, by a hash of its name."""


def twin_key(row: Row) -> str:
    """Return what rows of one model, device and layout share, whatever release or precision."""
    return "|".join(map(str, shape(row.raw)))


def held_out(row: Row) -> bool:
    """Return whether a row is kept from the fit; rows of one layout go together."""
    digest = hashlib.sha256(twin_key(row).encode()).digest()
    return digest[0] % HELD_OUT_OF == 0


def predicted(rows: Sequence[Row], given: Constants) -> list[float]:
    """Return the predicted TFLOP/s per GPU of rows, as their sources count."""
    return [row.rate(estimate_time(row.case, given).seconds) for row in rows]


def published(row: Row) -> float:
    """Return the published TFLOP/s per GPU."""
    return row.rate(row.seconds)


def errors(rows: Sequence[Row], rates: Sequence[float]) -> list[float]:
    """Return relative errors of rates."""
    return [abs(rate / published(row) - 1) for row, rate in zip(rows, rates, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of values does not exceed, the nearest above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summary(found: Sequence[float]) -> dict[str, float]:
    """Return count, median, 80th percentile and worst."""
    if not found:
        return {"rows": 0}
    return {
        "rows": len(found),
        "median": round(median(found), 4),
        "p80": round(percentile(found, 0.8), 4),
        "worst": round(max(found), 4),
    }


def grouped(
    rows: Sequence[Row], found: Sequence[float], key: Callable[[Row], str]
) -> dict[str, dict[str, float]]:
    """Return a summary per group."""
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, found, strict=True):
        groups.setdefault(key(row), []).append(error)
    return {name: summary(errors) for name, errors in sorted(groups.items())}


def twin(row: Row, known: Sequence[Row]) -> float | None:
    """Return the rate of the nearest known row: most in common, then nearest release by order."""

    def near(other: Row) -> float:
        mine, theirs = row.raw, other.raw
        score = 8.0 * (mine["model"] == theirs["model"]) + 4.0 * (mine["gpu"] == theirs["gpu"])
        score += 2.0 * (mine.get("precision") == theirs.get("precision"))
        score += sum(a == b for a, b in zip(shape(mine), shape(theirs), strict=True)) / 4
        return score + 1.5 * (row.stack == other.stack)

    others = [other for other in known if other.id != row.id]
    same = [other for other in others if other.raw["gpu"] == row.raw["gpu"]]
    best = max(same or others, key=near, default=None)
    return None if best is None else published(best)


def constant(row: Row, known: Sequence[Row]) -> float | None:
    """Return the median rate of known rows of the same device and format."""
    mine = row.case.cluster.device.name, row.case.number_formats.recipe
    rates = [
        published(other)
        for other in known
        if other.id != row.id
        and (other.case.cluster.device.name, other.case.number_formats.recipe) == mine
    ]
    everything = [published(other) for other in known if other.raw["gpu"] == row.raw["gpu"]]
    pool = rates or everything
    return median(pool) if pool else None


def sweeps(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return layout sweeps: one source, model, device, number, length and format; 3 layouts."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        raw = row.raw
        source = "-".join(raw["id"].split("-")[:2])
        key = f"{source} {raw['model']} {raw['num_gpus']} {raw['gpu']} {raw['seq_len']}"
        groups.setdefault(f"{key} {row.case.number_formats.recipe}", []).append(row)
    found = {}
    for name, members in groups.items():
        layouts = {
            (
                *shape(row.raw),
                row.case.dispatch,
                row.case.software.overlaps,
                row.case.layout.zero,
            )
            for row in members
        }
        if len(layouts) >= 3:
            found[name] = members
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1, ties sharing their mean."""
    return [
        1 + sum(other < value for other in values) + (sum(o == value for o in values) - 1) / 2
        for value in values
    ]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation."""
    a, b = ranks(one), ranks(other)
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    sides = [sum((x - mean) ** 2 for x in side) for side in (a, b)]
    return top / (sides[0] * sides[1]) ** 0.5 if all(sides) else 0.0


def sweep_scores(rows: Sequence[Row], given: Constants) -> dict[str, dict[str, Any]]:
    """Return for each sweep its rank correlation and what picking by prediction loses."""
    found = {}
    for name, members in sweeps(rows).items():
        rates, real = predicted(members, given), [published(row) for row in members]
        pick = real[max(range(len(rates)), key=lambda i: rates[i])]
        found[name] = {
            "rows": len(members),
            "spearman": round(spearman(rates, real), 3),
            "regret": round(1 - pick / max(real), 4),
        }
    return found
