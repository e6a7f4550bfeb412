"""``moefold explain``: the resolved run, each value's origin, and what follows from it."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "explain",
        help="the resolved run: every value with its origin, and what follows from it",
        description="Shows a run as it will be computed: every value with the file and line, base, "
        "override or default it comes from, then what follows from them, and where each rank "
        "of its layout stands. Needs no data and no GPU.",
    )
    parser.add_argument("source", metavar="RUN", help="run file, recipe, or Hugging Face folder")
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="such as train.steps=100")
    parser.add_argument(
        "--layout", metavar="SIZES", help='such as "tp2 pp2 ep4" (default: the run\'s)'
    )
    parser.add_argument(
        "--world", metavar="N", type=int, help="ranks (default: the fewest that fit)"
    )
    parser.add_argument("--given", action="store_true", help="leave defaults out")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.cli._explain import explain

    return explain(args)
