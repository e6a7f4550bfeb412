"""How near the planner's time model comes to published measurements.

    python bench/plan_accuracy.py                    # every figure, with the shipped constants
    python bench/plan_accuracy.py --fit --save       # fits the constants, writes both files
    python bench/plan_accuracy.py --later            # the rows that were found after the fit
    python bench/plan_accuracy.py --rows FILE --json # one line per row of any file of that form

The rows, with their sources, are in ``bench/data/published_runs.json``. Which are left out is a
rule in ``planning/rows.py``, and which are held out of the fit is a hash of their layout in
``planning/score.py``: both were written before any row was scored. What a row does not say is
filled in by ``planning/defaults.py``, ``recipes.py`` and ``numbers.py``: first written before
scoring, and since then replaced by what the stacks' own recipes say, tag and file named, once rows
that had run were found predicted out of memory. Constants belong to devices and software
releases, never to a row or a model. Errors are of TFLOP/s per GPU, the speed as the source counts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

from planning.ablations import ABLATIONS, effect, right
from planning.fit import constants_with, fit, priors_for, save, stacks_of, support
from planning.rows import FILE, Row, read
from planning.score import (
    constant,
    errors,
    grouped,
    held_out,
    percentile,
    predicted,
    published,
    summary,
    sweep_scores,
    twin,
)

from moefold.planner.case import Case
from moefold.planner.curves import Constants, constants
from moefold.planner.memory import rank_totals

KEPT = ("leave_one_model_out", "leave_one_stack_out", "constants")
"""Figures that need further fits; without one they are those of the stored file."""
RESULTS = Path(__file__).parent / "results" / "plan_accuracy.json"
LATER = Path(__file__).parents[1] / "tests" / "data" / "later_runs.json"
"""Rows that were gathered when the constants were fitted, from sources that say more since."""
LEAST_LATER = 12
"""Rows from which the bias of a device or a format is shown."""
ROUNDS = {"model": 3, "stack": 1}
"""Rounds of the fits without a model or a stack, from the fit of all; a stack's rows fix little but
its own factors.
"""
TARGETS = {
    "fitted": {"median": 0.056, "p80": 0.12},
    "held_out": {"median": 0.135, "p80": 0.25},
    "leave_one_model_out": {"median": 0.095},
    "leave_one_stack_out": {"median": 0.12},
}


def parts_of(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows that are fitted, and those that are held out."""
    used = [row for row in rows if not row.left_out]
    return [row for row in used if not held_out(row)], [row for row in used if held_out(row)]


def leave_out(
    fitted: Sequence[Row],
    key: str,
    start: dict[str, float],
    rounds: int,
    names: Sequence[str] | None = None,
) -> tuple[list[Row], list[float], dict[str, dict[str, float]]]:
    """Fit without one model or stack (of ``names``) after another.

    Returns what is left out, its errors, and the constants of each fit by what it left out.
    """
    if names is None:
        models = {row.raw["model"] for row in fitted}
        names = sorted(models) if key == "model" else stacks_of(fitted)
    tried: list[Row] = []
    found: list[float] = []
    every: dict[str, dict[str, float]] = {}
    for name in names:
        out = [row for row in fitted if _named(row, key) == name]
        rest = [row for row in fitted if _named(row, key) != name]
        values = fit(rest, start=start, rounds=rounds)
        tried += out
        found += errors(out, predicted(out, constants_with(values, rest)))
        every[name] = values
    return tried, found, every


def moves(
    rows: Sequence[Row], values: dict[str, float], without: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return each fitted constant with its prior, what fixes it, and how far it moves at most when
    a model is left out: the value without that model.
    """
    priors = priors_for(rows)
    found: dict[str, dict[str, Any]] = {}
    for name, fixed in support(rows, values).items():
        value = values[name]
        kept = {model: others[name] for model, others in without.items() if name in others}
        furthest = max(kept, key=lambda model: abs(log(kept[model] / value)))
        found[name] = {
            "value": float(f"{value:.4g}"),
            "prior": priors[name][0],
            "spread": priors[name][1],
            **fixed,
            "furthest": float(f"{kept[furthest]:.4g}"),
            "without": furthest,
        }
    return found


def _named(row: Row, key: str) -> str:
    return row.raw["model"] if key == "model" else row.stack


def effects(given: Constants) -> list[dict[str, Any]]:
    """Return published and predicted effects, whether sign and size are right, and how far off."""
    found = []
    for one in ABLATIONS:
        value = effect(one, given)
        found.append({
            "name": one.name,
            "published": round(one.published, 3),
            "predicted": round(value, 3),
            "sign": value * one.published > 0,
            "right": right(one.published, value),
            "points": round(100 * abs(value - one.published), 1),
        })  # fmt: skip
    return found


def baselines(rows: Sequence[Row], known: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the errors of copying the nearest known row, and of one rate per device and format."""
    found = {}
    for name, rule in (("nearest_twin", twin), ("constant_rate", constant)):
        pairs = [(row, rule(row, known)) for row in rows]
        kept = [(row, rate) for row, rate in pairs if rate is not None]
        found[name] = summary(errors([row for row, _ in kept], [rate for _, rate in kept]))
    return found


def memory_of(case: Case) -> tuple[float | None, bool | None]:
    """Return decimal GB of the fullest rank and whether they fit; nothing for unplanned kinds."""
    try:
        needed = max(rank_totals(case))
    except ValueError:
        return None, None
    return round(needed / 1e9, 2), needed <= case.cluster.device.memory_bytes


def fits(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many rows that ran are predicted to fit, and which of either kind are not right.

    Rows with a case are counted, those without a metric and with a conflict among them.
    """
    found: dict[str, list[tuple[str, bool]]] = {"ran": [], "out_of_memory": []}
    for row in rows:
        if row.planned is None:
            continue
        _, fitting = memory_of(row.planned)
        kind = "out_of_memory" if row.raw.get("status") == "OOM" else "ran"
        if fitting is not None:
            found[kind].append((row.id, fitting))
    wanted = {"ran": True, "out_of_memory": False}
    return {
        kind: {
            "rows": len(found[kind]),
            "right": sum(fitting == wanted[kind] for _, fitting in found[kind]),
            "wrong": [name for name, fitting in found[kind] if fitting != wanted[kind]],
        }
        for kind in found
    }


def report(rows: Sequence[Row], given: Constants) -> dict[str, Any]:
    """Return every figure that needs no further fit."""
    fitted, held = parts_of(rows)
    used = [*fitted, *held]
    wrong = {"fitted": errors(fitted, predicted(fitted, given)),
             "held_out": errors(held, predicted(held, given))}  # fmt: skip
    every = [*wrong["fitted"], *wrong["held_out"]]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.left_out:
            reason = row.left_out.split(":")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
    changed = effects(given)
    return {
        "left_out": dict(sorted(reasons.items())),
        "marked_regressions": [row.id for row in used if row.marks],
        "fitted": summary(wrong["fitted"]) | {"baselines": baselines(fitted, fitted)},
        "held_out": summary(wrong["held_out"]) | {"baselines": baselines(held, fitted)},
        "by_source": grouped(used, every, lambda row: row.id.split("-")[0]),
        "by_stack": grouped(used, every, lambda row: row.stack),
        "by_model": grouped(used, every, lambda row: row.raw["model"]),
        "by_device": grouped(used, every, lambda row: row.raw["gpu"]),
        "sweeps": sweep_scores(used, given),
        "fits": fits(rows),
        "ablations": {
            "count": len(changed),
            "right_sign": sum(one["sign"] for one in changed),
            "right": sum(one["right"] for one in changed),
            "each": changed,
        },
    }


def fit_all(rows: Sequence[Row], tell: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Fit, and fit again without each model and each stack; return constants and those figures."""
    fitted, held = parts_of(rows)
    # Downhill from the constants of before, as a change of the model moves few of them far.
    values = fit(fitted, start=constants().values, rounds=15, tell=tell)
    given = constants_with(values, fitted)
    found: dict[str, Any] = {}
    wrong = {}
    for key in ("model", "stack"):
        tried, wrong[key], others = leave_out(fitted, key, values, ROUNDS[key])
        if key == "model":
            found["constants"] = moves(fitted, values, others)
        found[f"leave_one_{key}_out"] = summary(wrong[key]) | {
            "each": grouped(tried, wrong[key], lambda row, key=key: _named(row, key))
        }
        tell(f"without each {key}: median {found[f'leave_one_{key}_out']['median']:.3f}")
    known = errors(held, predicted(held, given)) + errors(fitted, predicted(fitted, given))
    unknown = wrong["stack"]
    spread = {
        "measured": percentile(known, 0.68),
        "one": percentile(unknown, 0.68),
        "none": percentile(unknown, 0.8),
    }
    save(values, fitted, spread)
    return values, found


def line(row: Row, given: Constants) -> dict[str, Any]:
    """Return what is said of one row."""
    said: dict[str, Any] = {"id": row.id}
    if row.planned is None:
        return said | {"left_out": row.left_out}
    if row.measured is not None:
        said["published"] = round(published(row), 2)
        said["predicted"] = round(predicted([row], given)[0], 2)
    memory, fits = memory_of(row.planned)
    said |= {"memory_gb": memory, "fits": fits}
    if row.left_out:
        said["left_out"] = row.left_out
    return said


def show(found: dict[str, Any]) -> None:
    """Print the figures."""
    for name, targets in TARGETS.items():
        if name in found:
            one = found[name]
            goal = ", ".join(f"{key} <= {value:.1%}" for key, value in targets.items())
            print(f"{name:22s} {_line(one)}   (to reach: {goal})")
            for base, other in one.get("baselines", {}).items():
                print(f"  {base:20s} {_line(other)}")
    for group in ("by_source", "by_stack", "by_model", "by_device"):
        print(group)
        for name, one in found[group].items():
            print(f"  {name:28s} {_line(one)}")
    for kind, one in found["fits"].items():
        wrong = f": not {', '.join(one['wrong'])}" if one["wrong"] else ""
        print(f"{kind.replace('_', ' ')}: {one['right']} of {one['rows']} predicted so{wrong}")
    print("sweeps")
    for name, one in found["sweeps"].items():
        print(f"  {name:62s} {one['rows']:3d}  spearman {one['spearman']:5.2f}  "
              f"pick {one['regret']:.1%} slower")  # fmt: skip
    if "constants" in found:
        print("constants: value, prior, rows that it moves and their share of what fixes it (most "
              "of it from which model), furthest value when a model is left out")  # fmt: skip
    for name, one in found.get("constants", {}).items():
        first = next(iter(one["models"]), "-")
        print(f"  {name:30s} {one['value']:9.4g} {one['prior']:8.3g}  {one['rows']:4d} rows "
              f"{one['share']:5.1%} ({first} {one['models'].get(first, 0):.0%})  "
              f"{one['furthest']:9.4g} without {one['without']}")  # fmt: skip
    effects = found["ablations"]
    print(f"ablations: {effects['right_sign']} of {effects['count']} of the right sign, "
          f"{effects['right']} of the right size too")  # fmt: skip
    for one in effects["each"]:
        print(f"  {one['name']:52s} {one['published']:+7.1%} {one['predicted']:+7.1%}"
              f"{'' if one['right'] else '  wrong'}")  # fmt: skip


def _line(one: dict[str, float]) -> str:
    if not one["rows"]:
        return "no rows"
    return (
        f"{one['rows']:4d} rows  median {one['median']:6.1%}  p80 {one['p80']:6.1%}  "
        f"worst {one['worst']:6.1%}"
    )


def each(rows: Sequence[Row], given: Constants) -> None:
    """Print every row, the worst last."""
    used = [row for row in rows if not row.left_out]
    rates = predicted(used, given)
    for row, rate in sorted(
        zip(used, rates, strict=True), key=lambda pair: abs(pair[1] / published(pair[0]) - 1)
    ):
        part = "held" if held_out(row) else "fit"
        mark = " regression" if row.marks else ""
        print(f"{row.id:56s} {part:4s} {published(row):7.0f} {rate:7.0f} "
              f"{rate / published(row) - 1:+7.1%}{mark}")  # fmt: skip


def signed(rows: Sequence[Row], given: Constants) -> list[float]:
    """Return relative errors with their sign; above zero a row is planned too fast."""
    rates = predicted(rows, given)
    return [rate / published(row) - 1 for row, rate in zip(rows, rates, strict=True)]


def later(rows: Sequence[Row], given: Constants) -> dict[str, Any]:
    """Return the errors of rows that no fit has seen: of all, and of each device and format with
    at least :data:`LEAST_LATER` rows.
    """
    used = [row for row in rows if not row.left_out]
    groups = {"all": used}
    for row in used:
        for name in (row.raw["gpu"], row.case.number_formats.recipe):
            groups.setdefault(name, []).append(row)
    found: dict[str, Any] = {}
    for name, members in groups.items():
        if name == "all" or len(members) >= LEAST_LATER:
            wrong = signed(members, given)
            found[name] = summary([abs(one) for one in wrong]) | {
                "mean": round(sum(wrong) / len(wrong), 4)
            }
    return found


def show_later(found: dict[str, Any]) -> None:
    """Print the errors of rows that no fit has seen."""
    print("rows found after the fit (to reach: median <= 11%, mean within 6%; within 8% by group)")
    for name, one in found.items():
        print(f"  {name:20s} {_line(one)}  mean {one['mean']:+.1%}")


def main() -> None:
    """Fit or score, and print."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rows", type=Path, default=FILE, help="a file of the published form")
    parser.add_argument("--json", action="store_true", help="one line per row")
    parser.add_argument("--each", action="store_true", help="every row, published and predicted")
    parser.add_argument(
        "--later", action="store_true", help="the rows that were found after the fit"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants and write them")
    parser.add_argument(
        "--save", action="store_true", help="write bench/results/plan_accuracy.json"
    )
    args = parser.parse_args()
    rows = read(LATER if args.later else args.rows)
    if args.later:
        each(rows, constants())
        show_later(later(rows, constants()))
        return
    if args.json:
        for row in rows:
            print(json.dumps(line(row, constants())))
        return
    more: dict[str, Any] = {}
    if args.fit:
        values, more = fit_all(rows, lambda text: print(text, file=sys.stderr, flush=True))
        given = constants_with(values, parts_of(rows)[0])
    else:
        given = constants()
        if RESULTS.exists() and args.rows == FILE:
            stored = json.loads(RESULTS.read_text("utf-8"))
            more = {key: stored[key] for key in stored if key in KEPT}
    found = report(rows, given) | more
    if args.each:
        each(rows, given)
    show(found)
    if args.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
