"""``moefold demo``: trains a small mixture of experts on real text, in five minutes."""

import argparse
from typing import Any

RECIPE = "demo"


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small mixture of experts on real text",
        description="Trains the recipe demo on the Python standard library's own sources into a "
        "new folder below runs/, and says what to type next. Exit status as of `moefold train`.",
    )
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="such as seed=2")
    parser.add_argument("--folder", metavar="OUT", help="where to (default: a new one in runs/)")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.run import load_run

    run = load_run(RECIPE, args.overrides)
    from moefold.cli._demo import demo

    return demo(run, args)
