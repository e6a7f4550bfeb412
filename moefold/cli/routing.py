"""``moefold routing``: which experts tokens chose, as a run recorded it.

Prints a line of JSON for each step and layer: the load of each expert, how concentrated it is, and
how much it has in common with the recorded step before. docs/routing.md explains the keys.
"""

import argparse
import json
from pathlib import Path

from moefold.files import write_text
from moefold.training.routing_trace import lines


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="what train.routing.record wrote"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="output file (default: the console)"
    )
    text = "add ids and experts of each token, -1 - expert where it was dropped"
    parser.add_argument("--tokens", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if not args.folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(args.folder))
    found = (json.dumps(line) for line in lines(args.folder, args.tokens))
    if args.out is None:
        for line in found:
            print(line)
    else:
        write_text(args.out, "\n".join(found) + "\n")
    return 0
