"""Tables for docs/gpu.md and a picture, from the results of the other parts.

Each chip that has results has its own tables. Where there are none the page says so. With a folder,
tables and pictures of its results go there and not into the docs.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.device import RESULTS
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PAGE, IMAGES = ROOT / "docs" / "gpu.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- measured: python bench/on_gpu.py tables -->\n", "<!-- end of measured -->\n"
NOTHING = """\
No figure of a GPU stands in this repository: none was measured. What is here is counted on `meta`,
where a step runs through all branches for accelerators and computes nothing, or it is an estimate
that says so.
"""
PARTS = (
    "ceilings", "operations", "steps", "state", "offload", "memory", "capture", "stash", "clones",
    "tables",
)  # fmt: skip
"""What ``bench/on_gpu.py`` runs, in this order."""
DRAWN = {"ceilings", "operations"}
"""Parts that the picture is of."""
FACTS = ("chip", "driver", "torch", "cuda", "triton", "commit")
Results = dict[str, dict[str, Any]]
"""One chip's files by part."""


def run(folder: Path | None) -> int:
    """Write the page and the pictures; returns 0."""
    found = results(folder or RESULTS)
    if folder is None:
        PAGE.write_text(page(PAGE.read_text("utf-8"), found), "utf-8")
    else:
        (folder / "tables.md").write_text(measured(found), "utf-8")
    for chip, parts in found.items():
        draw(parts, (folder or IMAGES) / f"roofline_{chip}.png")
    return 0


def results(folder: Path) -> dict[str, Results]:
    """Return each chip's results by part."""
    found: dict[str, Results] = {}
    for file in sorted(folder.glob("*_*.json")):
        chip, _, part = file.stem.rpartition("_")
        if part != "machine":
            found.setdefault(chip, {})[part] = json.loads(file.read_text("utf-8"))
    return found


def page(text: str, found: Mapping[str, Results]) -> str:
    """Return the page with what was measured in its place."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + measured(found) + END + after


def measured(found: Mapping[str, Results]) -> str:
    """Return all chips' tables, or that there are none."""
    if not found:
        return NOTHING
    return "\n".join("\n".join(_of_chip(chip, parts)) + "\n" for chip, parts in found.items())


def _of_chip(chip: str, parts: Results) -> Iterator[str]:
    facts = next(iter(parts.values()))
    said = [f"{name} {facts[name]}" for name in FACTS[1:] if facts.get(name)]
    yield f"## {facts['chip']}\n\n{', '.join(said)}.\n"
    for part, table in (("ceilings", _ceilings), ("operations", _operations), ("steps", _steps)):
        if part in parts:
            yield from table(parts[part]["rows"])
            yield ""
    if parts.keys() >= DRAWN:
        yield f"![share of bounds](images/roofline_{chip}.png)"
    yield from _without_result(facts["chip"], parts)


def _without_result(chip: str, parts: Results) -> Iterator[str]:
    """Yield which parts and tests have no result of a chip."""
    missing = [part for part in PARTS if part not in parts and part != "tables"]
    passed = {row["name"] for row in parts.get("tests", {"rows": []})["rows"]}
    tests = [name for name in device_tests() if name not in passed]
    if not missing and not tests:
        return
    yield f"### Without a result on this {chip}\n"
    if missing:
        yield f"- Parts of `bench/on_gpu.py`: {', '.join(missing)}."
    yield from (f"- `{name}`" for name in tests)


def device_tests() -> list[str]:
    """Return the test functions of ``tests/gpu``, each with its file."""
    return [
        f"{file.name}::{node.name}"
        for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" + "---:|" * (len(titles) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _ceilings(rows: list[dict[str, Any]]) -> Iterator[str]:
    def cells() -> Iterator[Sequence[str]]:
        for row in rows:
            for unit, scale in (("flops_per_s", "TFLOP/s"), ("bytes_per_s", "GB/s")):
                rate = row.get(unit)
                by_name = rate if isinstance(rate, dict) else {"": rate} if rate else {}
                for name, value in by_name.items():
                    number = value / (1e12 if unit[0] == "f" else 1e9)
                    yield f"{row['name']} {name}".strip(), f"{number:.4g} {scale}"
            if row.get("unit") == "FLOP/s":
                ways = {k: v for k, v in row.items() if isinstance(v, float)}
                yield from (
                    (f"{row['name']} {k}", f"{v / 1e12:.4g} TFLOP/s") for k, v in ways.items()
                )

    yield from _table(("ceiling", "rate"), cells())


def _operations(rows: list[dict[str, Any]]) -> Iterator[str]:
    def cells() -> Iterator[Sequence[str]]:
        for row in rows:
            shares = row.get("share_of_bound", {})
            for form, seconds in row.get("seconds", {}).items():
                took = f"{seconds * 1e6:.1f}", f"{row['bound_s'] * 1e6:.1f}"
                yield row["name"], form, *took, f"{shares[form]:.0%}"

    yield from _table(("operation", "form", "µs", "bound, µs", "share of the bound"), cells())


def _steps(rows: list[dict[str, Any]]) -> Iterator[str]:
    def cells() -> Iterator[Sequence[str]]:
        for row in rows:
            if "tokens_per_s" in row:
                peak, waited = row["peak_bytes"], row["waits"]
                traced = "busy_share" in row
                yield (
                    row["name"] + (", a graph" if row.get("graphs") == "step" else ""),
                    *(f"{row[key]}" for key in ("layers", "rows", "micro_batches")),
                    f"{row['median'] * 1e3:.1f}", f"{row['tokens_per_s']:,.0f}",
                    f"{row['share_of_products']:.1%}",
                    f"{row['busy_share']:.0%}" if traced else "–",
                    f"{row['kernels']:,}" if traced else "–",
                    "–" if waited is None else str(sum(waited.values())),
                    "–" if peak is None else f"{peak / 1e9:.1f}",
                )  # fmt: skip

    titles = (
        "step", "layers", "rows", "micro-batches", "ms", "tokens/s", "of products' rate", "busy",
        "kernels", "waits", "GB",
    )  # fmt: skip
    yield from _table(titles, cells())


def draw(parts: Results, path: Path) -> None:
    """Draw operations under the roof of their chip, and the share of their bound by form."""
    if not parts.keys() >= DRAWN:
        return
    machine, rows = parts["ceilings"]["machine"], parts["operations"]["rows"]
    rows = [row for row in rows if row.get("seconds")]
    figure = Figure(figsize=(15, 0.22 * len(rows) + 4), layout="constrained")
    roof, bars = figure.subplots(1, 2)
    ridge = machine["bf16"] / machine["bandwidth"]
    ends = [ridge / 1e3, ridge, ridge * 1e2]
    roof.loglog(ends, [min(machine["bf16"], x * machine["bandwidth"]) / 1e12 for x in ends], "k")
    for row in rows:
        fastest = min(row["seconds"].values())
        if row["flops"]:
            at = row["flops"] / row["bytes"], row["flops"] / fastest / 1e12
            roof.plot(*at, "o")
            roof.annotate(row["name"], at, fontsize=7)
    roof.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title=parts["ceilings"]["chip"])
    forms = sorted({form for row in rows for form in row["seconds"]})
    for form in forms:
        shares = [row["share_of_bound"].get(form) for row in rows]
        bars.plot(shares, range(len(rows)), "o", label=form)
    bars.set(xscale="log", xlabel="share of the bound", title="each form of an operation")
    bars.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    bars.axvline(1.0, color="k")
    bars.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
