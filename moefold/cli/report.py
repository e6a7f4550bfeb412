"""``moefold report``: write a run's curves and expert load as an HTML page.

Reads the folder of a run, finished or not, and writes one HTML file that needs no network. If
`watch.profile` traced steps, it prints what bounded the last one, as parts that add up to it. For a
run with adapters on experts it also draws moved.png: how far they changed each expert's weights.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.cli._common import add_json, print_json
from moefold.cli._walls import print_walls
from moefold.files import try_output, write_text
from moefold.planner.hardware import default_machine_file
from moefold.planner.walls import StepWalls
from moefold.run import load_run
from moefold.training.report import render_report, summary
from moefold.training.run_folder import RUN_FILE, History, traced_walls


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a run's folder")
    parser.add_argument("--html", metavar="FILE", help="output file (default: FOLDER/report.html)")
    add_json(parser, "print the figures as JSON and write no page")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    folder: Path = args.folder
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))
    history = History.read(folder)
    if not history.lines:
        raise ValueError(f"{folder}: holds no metrics.jsonl with steps; name the folder of a run")
    walls = traced_walls(folder)
    if args.json:
        print_json(summary(history) | ({"walls": walls} if walls else {}))
        return 0
    path = Path(args.html) if args.html else folder / "report.html"
    try_output(path)
    write_text(path, render_report(history, folder.resolve().name, str(folder), walls))
    print(path)
    for traced in walls[-1:]:
        console = Console()
        steps = ", ".join(str(each["step"]) for each in walls)
        text = f"step {traced['step']} (traced steps: {steps}; `--json` has all)"
        console.print(Text(text, style="bold"), soft_wrap=True)
        print_walls(console, _planned_now(traced, folder))
    checkpoint = find_newest(folder)
    if checkpoint is not None and manifest.read(checkpoint).meta.get("adapters"):
        # Imported here: torch takes a second.
        from moefold.training.hooks.plots import draw_adapter_changes

        picture = folder / "moved.png"
        if draw_adapter_changes(checkpoint, picture, folder.resolve().name):
            print(picture)
    return 0


def _planned_now(traced: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a traced step's walls; if it was not planned then, beside a plan of this machine."""
    if traced["planned"] is not None or traced["device"] != "cpu":
        return traced
    if not default_machine_file().exists():
        return traced
    # Imported here: torch takes a second.
    from moefold.training.walls_bench import describe_walls

    run = load_run(str(folder / RUN_FILE))
    return traced | describe_walls(StepWalls.from_json(traced), run, "cpu")
