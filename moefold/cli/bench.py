"""``moefold bench``: measure this machine on recipes, beside what the planner says.

Times products, attention, memory and small steps on one thread of this machine's CPU, writes them
to a file that plans can use, and shows the step of each run as planned with them, as measured in
turn with the others, and as on record.
"""

import argparse

RUNS = ["demo", "tiny"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "sources", metavar="RUN", nargs="*", help="run files or recipes (default: demo tiny)"
    )
    parser.add_argument("--machine", metavar="FILE", help="where to write (default: a cache)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="times each step is run")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.run import load_run

    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: at least 1")
    args.sources = args.sources or RUNS
    for source in args.sources:
        load_run(source)
    from moefold.cli._bench import bench

    return bench(args)
