"""``moefold plan``: memory, time and the best layouts of a run on any cluster."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, time and the best layouts of a run on any cluster",
        description="Plans a run on a cluster that need not exist: memory by part and time by part "
        "of its layout, what binds, the fastest layouts that fit, and what to change. Needs no GPU "
        "and allocates nothing. docs/plan.md says how to read it and how far to trust it.",
    )
    parser.add_argument(
        "source", metavar="RUN", help="run file, recipe, Hugging Face folder, or published model"
    )
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="such as train.micro_batch=2")
    parser.add_argument(
        "--cluster", metavar="NAME", required=True, help="device and number, such as h100x256"
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        help="sequences per step, all devices (default: the run's; published models have none)",
    )
    parser.add_argument(
        "--layout", metavar="SIZES", help='such as "tp2 pp2 ep4" (default: the run\'s)'
    )
    parser.add_argument(
        "--seq",
        metavar="N",
        type=int,
        help="tokens of a published model's sequence (default: 4096)",
    )
    parser.add_argument(
        "--load", metavar="X", type=float, help="fullest expert rank over the mean (default: 1.2)"
    )
    parser.add_argument(
        "--memory", metavar="GB", type=float, help="of a device (default: as it is sold)"
    )
    parser.add_argument(
        "--price", metavar="X", type=float, help="of a device and hour (default: no money is named)"
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=float,
        help="of the whole run, such as 15e12 (default: the run's, or 1e12)",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page that explains the plan (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.cli._plan import plan

    return plan(args)
