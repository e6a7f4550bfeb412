"""``moefold routing``: print statistics of a run's recorded routing.

Prints a line of JSON for each step and layer: the load of each expert, how concentrated it is, and
how much it overlaps with that of the previous recorded step. docs/routing.md explains the keys.
"""

import argparse
import json
from pathlib import Path

from moefold.files import try_output, write_text
from moefold.training.routing_trace import iter_figures


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder that train.routing.record wrote"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="output file (default: stdout)")
    text = "add each token's id and experts; a dropped choice is -1 - expert"
    parser.add_argument("--tokens", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if not args.folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(args.folder))
    if args.out is not None:
        try_output(args.out)
    rows = (json.dumps(line) for line in iter_figures(args.folder, args.tokens))
    if args.out is None:
        for row in rows:
            print(row)
    else:
        write_text(args.out, "\n".join(rows) + "\n")
    return 0
