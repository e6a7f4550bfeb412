"""What ``moefold report`` does. Imports no torch."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moefold.files import write_text
from moefold.training.report import page, summary
from moefold.training.run_folder import History


def report(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    folder = Path(args.folder)
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))
    history = History.read(folder)
    if not history.lines:
        raise ValueError(f"{folder}: has no metrics.jsonl with steps in it; is it a run's folder?")
    if args.json:
        print(json.dumps(summary(history), indent=2))
        return 0
    path = Path(args.html) if args.html else folder / "report.html"
    write_text(path, page(history, folder.resolve().name, str(folder)))
    Console(soft_wrap=True).print(Text(str(path)))
    return 0
