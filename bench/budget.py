"""Launches, bytes and waits of a training step on an accelerator, counted without one.

    python bench/budget.py RECIPE [--layout ep8] [--set PATH=VALUE ...] [--json] [--store]

Runs the real step of one rank on ``meta``, where no value is computed, with routing that is even,
and two micro-batches of one sequence each; the second one's calls are counted, as gradients add up
there. What ``launches`` counts is in that module. A wait is a place where the host reads what the
device computed. ``--store`` writes the budgets of all shapes that the test holds; ``--roofline``
estimates times.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from math import comb
from pathlib import Path
from typing import Any
from unittest import mock

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
from launches import Call, Launches, Place, attention_as_one
from no_values import apart, data_of, micro_batch
from rich.console import Console
from rich.table import Table
from roofline import roofline

from moefold.model.config import Decoder, Stack
from moefold.moe.config import Moe
from moefold.parallel.config import Layout
from moefold.parallel.pipeline.executor import Executor
from moefold.run import Run, load_run
from moefold.training.step import gradients

STORED = Path(__file__).parents[1] / "tests" / "data" / "budgets.json"
SHAPES = {
    "qwen3_30b_a3b ep8": ("qwen3_30b_a3b", "ep8"),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", ""),
    "deepseek_v3 ep64": ("deepseek_v3", "ep64"),
    "olmoe_1b_7b": ("olmoe_1b_7b", ""),
}
"""Recipe and sizes of the budgets that are kept, with nothing recomputed."""
STEADY = 1
"""The micro-batch that is counted: gradients are there, to which it adds."""


@dataclass(frozen=True)
class Spent:
    """What a part of a layer, or of the step, costs."""

    launches: int = 0
    bytes: int = 0
    least: int = 0
    """Bytes of one kernel that did all of it."""

    def __add__(self, other: "Spent") -> "Spent":
        """Return the sum."""
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


Parts = dict[str, dict[str, Spent]]
"""By part and direction, ``forward`` or ``backward``."""


@dataclass
class Budget:
    """What a step of one rank costs.

    Attributes:
        layers: parts of one layer of each kind, by the number of its first.
        micro_batch: parts of a micro-batch outside of layers.
        step: parts of a step outside of micro-batches, of the layers that were run.
        waits_micro_batch: reads of the device by the host in each micro-batch, by function.
        waits_step: those outside of micro-batches.
        calls: every launch of the step.
    """

    layers: dict[int, Parts] = field(default_factory=dict)
    micro_batch: Parts = field(default_factory=dict)
    step: Parts = field(default_factory=dict)
    waits_micro_batch: dict[str, int] = field(default_factory=dict)
    waits_step: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


def budget_of(run: Run, layout: Layout) -> Budget:
    """Count one step of the first rank of a layout, with as few layers as there are kinds."""
    decoder, numbers = _one_of_each(run.decoder)
    ranks, rows = layout.split.smallest_world, run.data.seq
    launches, budget = Launches(), Budget()
    told = _even_routing(decoder, rows, layout.split.ep)
    with apart(told, launches.note, launches.waits), attention_as_one(launches):
        data = data_of(decoder, layout, ranks)
        optimizer = data.optimizer(run.optim)
        recorder = data.parts.world.recorder
        launches.label = lambda: recorder.label
        with launches, _told_of_micro_batches(launches, budget):
            gradients(data, [micro_batch(rows)] * (STEADY + 1), run.train.loss_chunk)
            launches.keep(p.grad for p in data.params.values())
            optimizer.step(0.5)
            data.refresh_weights()
            for _, mixture in data.parts.model.moe_layers():
                mixture.balance.finish_step(mixture.router)
        budget.waits_step = dict(launches.waits - Counter(budget.waits_step))
    least, budget.calls = launches.least(), launches.calls
    for place, spent in _spent(launches.calls, least):
        if place.micro is None:
            into = budget.step
        elif place.micro != STEADY:
            continue
        elif place.layer is None:
            into = budget.micro_batch
        else:
            into = budget.layers.setdefault(numbers[place.layer], {})
        ways = into.setdefault(place.part, {"forward": Spent(), "backward": Spent()})
        ways["backward" if place.backward else "forward"] += spent
    return budget


def _one_of_each(decoder: Decoder) -> tuple[Decoder, list[int]]:
    """Return a decoder with one block of each kind, and where each first stood."""
    blocks = list(dict.fromkeys(decoder.blocks))
    numbers = [decoder.blocks.index(block) for block in blocks]
    return decoder.model_copy(update={"stacks": (Stack(blocks=tuple(blocks)),)}), numbers


def _share_sent_once(ffn: Any, ep: int) -> float:
    """Return ranks with any of a token's experts, for each expert of it, all being as likely."""
    experts, top_k = ffn.router.experts, ffn.router.top_k
    none_here = comb(experts - experts // ep, top_k) / comb(experts, top_k)
    return ep * (1 - none_here) / top_k


def _even_routing(decoder: Decoder, rows: int, ep: int) -> Any:
    """Return what counts say where every expert gets as many rows."""
    moe = next(block.ffn for block in decoder.blocks if isinstance(block.ffn, Moe))
    copies = rows * moe.router.top_k

    def numbers(count: int) -> list[Any]:
        if count == 2 * ep and ep > 1:
            return [copies // ep] * count
        return [rows] * count

    return numbers


@contextmanager
def _told_of_micro_batches(launches: Launches, budget: Budget) -> Iterator[None]:
    """While open, launches know their micro-batch, and the steady one's waits are counted."""
    start, run, waits = Executor._start_pass, Executor.run, launches.waits
    before: Counter[str] = Counter()

    def started(self: Executor, action: Any) -> Any:
        launches.micro = action.micro
        if action.micro == STEADY:
            before.update(waits)
        return start(self, action)

    def ran(self: Executor) -> Any:
        began = Counter(waits)
        result = run(self)
        budget.waits_micro_batch = dict(waits - before)
        budget.waits_step = dict(waits - began)
        launches.micro = None
        return result

    with (
        mock.patch.object(Executor, "_start_pass", started),
        mock.patch.object(Executor, "run", ran),
    ):
        yield


def _spent(calls: Sequence[Call], least: dict[Place, int]) -> Iterator[tuple[Place, Spent]]:
    for call in calls:
        yield call.place, Spent(1, sum(call.reads.values()) + sum(call.writes.values()))
    for place, size in least.items():
        yield place, Spent(0, 0, size)


def total(parts: Parts, direction: str | None = None) -> Spent:
    """Return the sum over parts, in one direction or both."""
    found = Spent()
    for by_direction in parts.values():
        for name, spent in by_direction.items():
            if direction in (None, name):
                found += spent
    return found


def tables(budget: Budget) -> Iterator[Table]:
    """Yield a table for each kind of layer, and of what is outside of layers."""
    named = {f"layer {number}": parts for number, parts in budget.layers.items()}
    named |= {"micro-batch, outside of layers": budget.micro_batch, "step": budget.step}
    for title, parts in named.items():
        table = Table(title=title, title_justify="left")
        table.add_column("part")
        for column in ("forward", "backward", "GB", "least GB", "ratio"):
            table.add_column(column, justify="right")
        ordered = sorted(parts.items(), key=lambda item: -total(dict([item])).bytes)
        for part, _ in [*ordered, ("all", None)]:
            rows = parts if part == "all" else {part: parts[part]}
            both = total(rows)
            ratio = f"{both.bytes / both.least:.1f}" if both.least else "–"
            launches = (total(rows, way).launches for way in ("forward", "backward"))
            size = f"{both.bytes / 1e9:.3f}", f"{both.least / 1e9:.3f}"
            table.add_row(part, *map(str, launches), *size, ratio)
        yield table


def stored_form(budget: Budget) -> dict[str, Any]:
    """Return what the test holds: launches and bytes of each part, and waits."""

    def pairs(parts: Parts) -> dict[str, Any]:
        return {
            f"{part} {way}": [spent.launches, spent.bytes]
            for part, ways in sorted(parts.items())
            for way, spent in sorted(ways.items(), reverse=True)
            if spent.launches
        }

    form = {f"layer {number}": pairs(parts) for number, parts in budget.layers.items()}
    form |= {"micro-batch": pairs(budget.micro_batch), "step": pairs(budget.step)}
    waits = {"micro-batch": budget.waits_micro_batch, "step": budget.waits_step}
    return {**form, "waits": waits}


def budgets() -> dict[str, Any]:
    """Return the budgets of all shapes that are kept."""
    return {
        name: stored_form(budget_of(load_run(recipe), Layout(sizes=sizes, zero=0)))
        for name, (recipe, sizes) in SHAPES.items()
    }


def main() -> None:
    """Print the budget that the command line asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="qwen3_30b_a3b")
    parser.add_argument("--layout", default="", help="sizes, such as ep8")
    parser.add_argument("--set", action="append", default=[], help="override, as PATH=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--roofline", action="store_true", help="estimate the time on H100")
    parser.add_argument("--store", action="store_true", help="write what the test holds")
    asked = parser.parse_args()
    if asked.store:
        text = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(budgets(), indent=1))
        STORED.write_text(text + "\n", "utf-8")
        return
    run = load_run(asked.recipe, asked.set)
    budget = budget_of(run, Layout(sizes=asked.layout, zero=0))
    if asked.json:
        json.dump(asdict(replace(budget, calls=[])), sys.stdout, indent=1)
        return
    console = Console()
    if asked.roofline:
        blocks = run.decoder.blocks
        if len(budget.layers) > 1:
            parser.error("--roofline takes a model whose layers are alike")
        once = _share_sent_once(blocks[-1].ffn, Layout(sizes=asked.layout).split.ep)
        table, cases = roofline(budget.calls, STEADY, len(blocks), run.data.seq, once)
        console.print(table)
        for name, found in cases.items():
            console.print(f"{name}: {found}")
        return
    for table in tables(budget):
        console.print(table)
    for where, waits in (("micro-batch", budget.waits_micro_batch), ("step", budget.waits_step)):
        for site, count in waits.items():
            console.print(f"{count} waits in each {where}: {site}")


if __name__ == "__main__":
    main()
