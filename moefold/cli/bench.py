"""``moefold bench``: measure this CPU, and compare planned with measured step times.

Times matrix products, attention, element-wise sums and small training steps on one thread of this
machine's CPU, and writes the rates to a file that `moefold plan --cluster cpu` reads. Then shows
each RUN's step time as planned with these rates and as measured.

With --walls it instead runs some steps of one RUN on random tokens, in the given layout, and says
what bounds them: products, memory traffic, exchanges, waits for the host or for other ranks, as
parts that add up to the step, each beside its plan, and the change that the planner thinks best.

With --memory it instead runs two steps of one RUN on random tokens, in the given layout, and shows
each rank's memory by part, planned and measured, after each action of the second step.

With --rank it runs steps of one rank of a layout of any size, alone on this machine: its layers,
shapes, kernels and schedule, with exchanges replaced by copies of the same size and priced by the
links of a device. On a CPU sizes are divided by a factor, which is printed.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moefold.cli._common import (
    add_json,
    add_layout,
    add_world,
    overrides_of,
    plain_table,
    print_json,
)
from moefold.cli._lone_rank import add_rank, run_rank
from moefold.cli._walls import print_walls
from moefold.files import folder_for, try_output
from moefold.planner.hardware import default_machine_file
from moefold.planner.walls import beside_plan
from moefold.run import Run, load_run

DEFAULT_RUNS = ["demo", "tiny"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "run files or recipes (default: demo tiny; with --memory one), and overrides k=v of all"
    parser.add_argument("sources", metavar="RUN", nargs="*", help=text)
    parser.set_defaults(overrides=[])
    text = "output .json file (default: the cached one that `plan --cluster cpu` reads)"
    parser.add_argument("--machine", metavar="FILE", help=text)
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=5, help="number of timings of each step"
    )
    text = "compare planned with measured memory instead of step times"
    parser.add_argument("--memory", action="store_true", help=text)
    text = "say what bounds a step, by parts that add up to it"
    parser.add_argument("--walls", action="store_true", help=text)
    add_rank(parser)
    add_layout(parser)
    add_world(parser)
    parser.add_argument("--picture", metavar="FILE", help="with --memory: plot it (default: none)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    _require_fitting_options(args)
    if args.rank is not None:
        return run_rank(args, _only_source(args, "--rank"))
    if args.memory:
        return _compare_memory(args)
    if args.walls:
        return _show_walls(args)
    sources = args.sources or DEFAULT_RUNS
    runs = {source: load_run(source, args.overrides) for source in sources}
    file = Path(args.machine) if args.machine else default_machine_file()
    with folder_for(file.parent):
        try_output(file)  # before minutes of measuring
    from moefold.training.calibrate import calibrate

    machine, steps = calibrate(runs, args.rounds)
    machine.write(file)
    if args.json:
        about = {"machine": machine.name, "threads": 1, "software": machine.software}
        print_json({**about, "rounds": args.rounds, "steps": steps, "file": str(file)})
        return 0
    console = Console()
    console.print(f"{machine.name}, one thread, {machine.software}", style="bold")
    console.print(
        f"matmul {machine.fp32 / 1e9:.0f} GFLOP/s in fp32, {machine.bf16 / 1e9:.0f} in bf16; "
        f"memory {machine.bandwidth / 1e9:.1f} GB/s"
    )
    titles = ("run", "planned", "measured", "error", "wall clock")
    table = plain_table(*titles, right=titles[1:])
    for source, times in steps.items():
        planned, measured_s, wall = (
            f"{times[name]:.3f} s" for name in ("planned_s", "measured_s", "wall_s")
        )
        table.add_row(source, planned, measured_s, f"{times['off']:+.0%}", wall)
    console.print(table)
    console.print(Text(f"written to {file}", style="dim"), soft_wrap=True)
    return 0


def _require_fitting_options(args: argparse.Namespace) -> None:
    """Check that options are given with what they are options of."""
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: must be at least 1")
    is_given = {"--memory": args.memory, "--walls": args.walls, "--rank": args.rank is not None}
    kinds = [name for name, given in is_given.items() if given]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} are {len(kinds)} measurements: leave one out")
    needs = {
        "picture": ("--memory",),
        "shrink": ("--rank",),
        "links_of": ("--rank",),
        "layout": tuple(is_given),
        "world": tuple(is_given),
    }
    for option, needed in needs.items():
        if getattr(args, option) is not None and not set(needed) & set(kinds):
            raise ValueError(f"--{option.replace('_', '-')} needs {' or '.join(needed)}")


def _only_source(args: argparse.Namespace, flag: str) -> str:
    """Return the run that a measurement of one run is of, by default the first of the defaults."""
    source, *others = args.sources or DEFAULT_RUNS[:1]
    if others:
        raise ValueError(f"{flag} measures one run: leave {' '.join(others)} out")
    return source


def _single_run(args: argparse.Namespace, flag: str) -> tuple[Run, int]:
    """Return the run that a measurement of one run is of, and its number of ranks."""
    source = _only_source(args, flag)
    run = load_run(source, overrides_of(args))
    return run, run.layout.split.smallest_world if args.world is None else args.world


def _show_walls(args: argparse.Namespace) -> int:
    """Print what bounds a run's step, measured beside planned."""
    run, world = _single_run(args, "--walls")
    from moefold.training.walls_bench import measure_walls

    measured = measure_walls(run, world, args.rounds)
    facts = beside_plan(measured.walls, (measured.task, measured.case))
    if args.json:
        about = {"run": run.name, "layout": run.layout.sizes, "world": world}
        print_json({**about, "untraced_s": measured.untraced_s, **facts})
        return 0
    console = Console()
    ranks = "one rank" if world == 1 else f"{world} ranks, {run.layout.split}"
    console.print(Text(f"{run.name}: {ranks}", style="bold"), soft_wrap=True)
    print_walls(console, facts)
    text = (
        f"a step without the trace takes {measured.untraced_s:.4g} s; planned with {measured.rates}"
    )
    console.print(Text(text, style="dim"), soft_wrap=True)
    return 0


def _compare_memory(args: argparse.Namespace) -> int:
    """Print planned and measured memory of the ranks after each action of a step."""
    run, world = _single_run(args, "--memory")
    picture = None if args.picture is None else Path(args.picture)
    if picture is not None:
        try_output(picture)
    from moefold.training.memory_bench import PARTS, compare_bytes, draw_bytes

    actions = compare_bytes(run, world)
    if picture is not None:
        draw_bytes(actions, f"{run.name}, {run.layout.split}").savefig(picture, dpi=144)
    if args.json:
        about = {"run": run.name, "layout": run.layout.sizes, "world": world, "parts": PARTS}
        print_json({**about, "actions": [asdict(action) for action in actions]})
        return 0
    table = plain_table("rank", "action", *PARTS, right=("rank", "action", *PARTS))
    for action in actions:
        cells = (f"{action.planned[p] / 1e6:.2f} {action.executed[p] / 1e6:.2f}" for p in PARTS)
        table.add_row(str(action.rank), action.action, *cells)
    # On a narrow terminal wrapped rows are better than truncated figures.
    console = Console(width=max(Console().width, Console(width=1000).measure(table).maximum))
    console.print(f"{run.name}: MB after each action, planned and measured", style="bold")
    console.print(table)
    return 0
