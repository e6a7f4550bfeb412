"""What ``moefold bench`` does: measures single kernels, then small steps and the runs' in turn."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moefold.files import demand_writable
from moefold.planner.case import Case
from moefold.planner.from_run import of_run
from moefold.planner.hardware import Machine, usual_file
from moefold.planner.time import estimate
from moefold.run import load_run
from moefold.training.calibrate import (
    SMALL_MODELS,
    adjusted,
    alternated,
    measure_kernels,
    stepping,
)
from moefold.training.machine import cpu_name

RECORD = Path(__file__).parents[2] / "bench" / "results" / "plan_cpu.json"
"""Figures on record, where the sources are at hand."""


def bench(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    file = Path(args.machine) if args.machine else usual_file()
    demand_writable(file)  # before minutes of measuring
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine, report = measured(args.sources, args.rounds)
    finally:
        torch.set_num_threads(threads)
    machine.write(file)
    if args.json:
        print(json.dumps({**report, "file": str(file)}, indent=1))
    else:
        show(report, machine, file)
    return 0


def measured(sources: list[str], rounds: int) -> tuple[Machine, dict[str, Any]]:
    """Return the machine, and each run's step as planned, as measured and as on record.

    Raises:
        ValueError: where a run is of several ranks or of no kind that is planned.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    first = measure_kernels(cpu_name(), f"torch {torch.__version__}", memory)
    runs = {source: planned(source, first) for source in sources}
    formats = sorted({case.numbers.recipe for case in runs.values()})
    smalls = {
        f"{recipe} {number}": small.case(recipe, first)
        for recipe in formats
        for number, small in enumerate(SMALL_MODELS)
    }
    took = alternated({name: stepping(case) for name, case in {**smalls, **runs}.items()}, rounds)
    machine = adjusted(first, list(smalls.values()), [took[name]["own"] for name in smalls])
    kept = on_record()
    steps = {}
    for source in runs:
        case = planned(source, machine)
        seconds = estimate(case, machine.constants(case.numbers.recipe)).seconds
        own, wall = took[source]["own"], took[source]["wall"]
        steps[source] = {
            "planned_s": seconds, "measured_s": own, "wall_s": wall, "off": seconds / own - 1,
            "record_s": kept.get(source),
        }  # fmt: skip
    about = {"machine": machine.name, "threads": 1, "software": machine.software}
    return machine, {**about, "rounds": rounds, "steps": steps}


def planned(source: str, machine: Machine) -> Case:
    """Return a run's step on this machine."""
    task, choice = of_run(load_run(source), machine.cluster, load=1.0)
    return choice.case(task)


def on_record() -> dict[str, float]:
    """Return the measured steps of the record, empty where there is none."""
    if not RECORD.exists():
        return {}
    steps = json.loads(RECORD.read_text("utf-8"))["steps"]
    return {source: one["measured_s"] for source, one in steps.items()}


def show(report: dict[str, Any], machine: Machine, file: Path) -> None:
    """Print the machine's rates and the table of steps."""
    console = Console()
    console.print(f"{machine.name}, one thread, {machine.software}", style="bold")
    console.print(
        f"products {machine.fp32 / 1e9:.0f} GFLOP/s in fp32, {machine.bf16 / 1e9:.0f} in bf16; "
        f"memory {machine.bandwidth / 1e9:.1f} GB/s"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("run", "planned", "measured", "off", "wall clock", "on record"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for source, one in report["steps"].items():
        kept = one["record_s"]
        table.add_row(
            source,
            f"{one['planned_s']:.3f} s",
            f"{one['measured_s']:.3f} s",
            f"{one['off']:+.0%}",
            f"{one['wall_s']:.3f} s",
            "" if kept is None else f"{kept:.3f} s",
        )
    console.print(table)
    console.print(f"written to {file}", style="dim")
