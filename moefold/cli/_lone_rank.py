"""``moefold bench RUN --rank N``: one rank of a large layout on this machine alone."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moefold.cli._common import overrides_of, plain_table, print_json
from moefold.config.errors import RunError
from moefold.planner.hardware import (
    Device,
    cpu_device,
    default_machine_file,
    device_by_name,
    find_device,
    read_device,
)
from moefold.run import load_run
from moefold.training.rank_task import (
    LoneRank,
    linked,
    make_lone_rank,
    planned_parts,
    rank_violations,
    require_rank,
)

LINKS = "h100"
"""Device whose links price exchanges, unless another is named."""
GUESSED_RATES = 3e10, 1e10
"""FLOP/s and bytes/s of a CPU that was not measured; times planned with them are not shown."""
MB = 1e6


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Add ``--rank`` and the options that need it."""
    text = "run this rank of the layout alone, exchanges replaced by copies (default: none)"
    parser.add_argument("--rank", metavar="N", type=int, help=text)
    text = "with --rank: divide widths, vocabulary and sequences by N (default: on a GPU 1, on a "
    text += "CPU as little as makes a step take seconds)"
    parser.add_argument("--shrink", metavar="N", type=int, help=text)
    text = f"with --rank: device whose links price the exchanges (default: this GPU, or {LINKS})"
    parser.add_argument("--links-of", metavar="NAME", help=text)


def run_rank(args: argparse.Namespace, source: str) -> int:
    """Measure a rank of a run's layout, and print it beside its plan; return the exit status."""
    named = None if args.links_of is None else device_by_name(args.links_of)
    run = _load(args, source)
    world = run.layout.split.smallest_world if args.world is None else args.world
    require_rank(run, args.rank, world, args.shrink)
    import torch

    from moefold.training.machine import HOST_BYTES
    from moefold.training.rank_bench import measure

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    here, is_measured = _this_device(args.machine, name, HOST_BYTES)
    links = named or (here if here.link_bandwidth else device_by_name(LINKS))
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else HOST_BYTES
    task = make_lone_rank(run, args.rank, linked(here, links, world), memory, args.shrink)
    facts = _facts(task, measure(task, device, args.rounds), links.name, is_measured)
    if args.json:
        print_json(facts)
        return 0
    console = Console(highlight=False)
    for part in _text(facts):
        console.print(part, soft_wrap=isinstance(part, Text))
    return 0


def _load(args: argparse.Namespace, source: str) -> Any:
    """Load the run; if it is not valid, say what is wrong with the rank too."""
    try:
        return load_run(source, overrides_of(args))
    except RunError as error:
        more = list(rank_violations(args.rank, args.world, args.shrink))
        if not more:
            raise
        raise RunError([*error.violations, *more], error.data, error.source) from None


def _this_device(machine: str | None, gpu: str, memory: int) -> tuple[Device, bool]:
    """Return this machine's device, and whether times can be planned for it.

    Raises:
        ValueError: nothing is known about the GPU.
    """
    if machine is not None:
        return read_device(Path(machine)), True
    if gpu:
        device = find_device(gpu)
        if device is None:
            text = f"no rates are known of {gpu}: describe it in a file, and name it by --machine"
            raise ValueError(text)
        return device, True
    file = default_machine_file()
    if file.exists():
        return read_device(file), True
    return cpu_device(*GUESSED_RATES, memory), False


def _facts(task: LoneRank, measured: Any, links: str, has_times: bool) -> dict[str, Any]:
    """Return what is printed, as plain data."""
    full = task.full
    case = task.case
    sizes = {
        name: [getattr(one, name), getattr(other, name)]
        for name, one, other in (
            ("hidden", case.decoder, full.decoder), ("vocab", case.decoder, full.decoder),
            ("seq", case, full), ("num_micro_batches", case, full),
        )
    }  # fmt: skip
    planned = planned_parts(task.time.parts)
    if not has_times:  # what depends on the links alone is known
        planned = {name: planned[name] for name in ("tp", "cp", "dispatch", "dp")}
    peak, planned_peak = measured.peak
    return {
        "run": task.run.name,
        "layout": case.layout.sizes or "one rank",
        "world": case.world,
        "rank": task.rank,
        "place": task.place,
        "stage": task.stage,
        "factor": task.factor,
        "sizes": sizes,
        "links": links,
        "seconds": dict(measured.seconds),
        "copy_seconds": measured.copy_seconds,
        "exchanges": {name: asdict(each) for name, each in measured.exchanges.items()},
        "planned_seconds": planned,
        "bytes": measured.bytes,
        "peak_bytes": peak,
        "planned_peak_bytes": planned_peak,
    }


def _text(facts: dict[str, Any]) -> Iterator[Text | Table]:
    place = " ".join(f"{name}{number}" for name, number in facts["place"].items())
    yield Text.assemble(
        (f"rank {facts['rank']:,} of {facts['world']:,}", "bold"),
        f" of {facts['run']} in {facts['layout']}: {place}, {facts['stage']}",
    )
    if facts["factor"] > 1:
        said = (
            f"{name.removeprefix('num_').replace('_', '-')} {ours:,} of {full:,}"
            for name, (ours, full) in facts["sizes"].items()
        )
        text = f"sizes divided by {facts['factor']}: {', '.join(said)}; layers, heads, experts, "
        yield Text(f"  {text}layout and schedule are the run's", style="yellow")
    yield Text("  random tokens, even routing, exchanges replaced by copies", style="dim")
    yield Text("")
    yield from _times(facts)
    yield Text("")
    yield from _exchanges(facts)
    yield Text("")
    yield from _memory(facts)


def _times(facts: dict[str, Any]) -> Iterator[Text | Table]:
    planned = {name: f"{value:.4g}" for name, value in facts["planned_seconds"].items()}
    seconds = dict(facts["seconds"])
    copies = facts["copy_seconds"]
    update = seconds.pop("optimizer")
    passes = sum(seconds.values()) - copies
    exchanged = sum(each["seconds"] for each in facts["exchanges"].values())
    rows = [(name, f"{value:.4g}", "") for name, value in seconds.items()]
    rows += [
        ("  of these copies instead of exchanges", f"{copies:.4g}", ""),
        ("all of these without copies", f"{passes:.4g}", planned.get("passes", "")),
        ("optimizer", f"{update:.4g}", planned.get("optimizer", "")),
        ("with exchanges by the links, none hidden", f"{passes + update + exchanged:.4g}", ""),
    ]
    titles = ("time of a step", "measured s", "planned s")
    yield plain_table(*titles, right=titles[1:], rows=rows)
    if "passes" not in planned:
        text = "  no planned times: run `moefold bench` once, which measures this CPU"
        yield Text(text, style="yellow")


def _exchanges(facts: dict[str, Any]) -> Iterator[Text | Table]:
    planned = facts["planned_seconds"]
    titles = (f"exchanges, links of {facts['links']}", "calls", "MB sent", "s", "planned s")
    rows = (
        (
            name, f"{each['calls']:,}", f"{each['bytes'] / 1e6:,.2f}", f"{each['seconds']:.3g}",
            f"{planned[name]:.3g}" if name in planned else "",
        )
        for name, each in facts["exchanges"].items()
        if each["calls"]
    )  # fmt: skip
    yield plain_table(*titles, right=titles[1:], rows=rows)


def _memory(facts: dict[str, Any]) -> Iterator[Text | Table]:
    titles = ("memory after the fullest action", "measured MB", "planned MB")
    sizes = {name: pair for name, pair in facts["bytes"].items() if any(pair)}
    sizes["sum"] = [sum(pair[side] for pair in sizes.values()) for side in (0, 1)]
    rows = [(name, *(f"{size / MB:,.2f}" for size in pair)) for name, pair in sizes.items()]
    peak = facts["peak_bytes"]
    measured = "" if peak is None else f"{peak / MB:,.2f}"
    rows += [("peak within actions", measured, f"{facts['planned_peak_bytes'] / MB:,.2f}")]
    yield plain_table(*titles, right=titles[1:], rows=rows)
