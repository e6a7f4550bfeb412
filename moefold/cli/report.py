"""``moefold report``: write a run's curves and expert load as an HTML page.

Reads the folder of a run, finished or not, and writes one HTML file that needs no network. For a
run with adapters on experts it also draws moved.png: how far they changed each expert's weights.
"""

import argparse
from pathlib import Path

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.cli._common import add_json, print_json
from moefold.files import try_output, write_text
from moefold.training.report import render_report, summary
from moefold.training.run_folder import History


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
    if args.json:
        print_json(summary(history))
        return 0
    path = Path(args.html) if args.html else folder / "report.html"
    try_output(path)
    write_text(path, render_report(history, folder.resolve().name, str(folder)))
    print(path)
    checkpoint = find_newest(folder)
    if checkpoint is not None and manifest.read(checkpoint).meta.get("adapters"):
        # Imported here: torch takes a second.
        from moefold.training.hooks.plots import draw_adapter_changes

        picture = folder / "moved.png"
        if draw_adapter_changes(checkpoint, picture, folder.resolve().name):
            print(picture)
    return 0
