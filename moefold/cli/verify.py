"""``moefold verify``: proves that layouts do not change the maths of a run."""

import argparse
from typing import Any

EXIT = """exit status:
  0  every layout computes what one rank computes
  1  one does not, or with --controls a break went unnoticed
  2  wrong input"""


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "verify",
        help="prove that layouts do not change the maths of a run",
        description="Shrinks the run's model, keeps its kinds of parts, runs it in each layout on "
        "processes of this machine and on one rank in fp64, and compares the loss, every "
        "gradient, the norm and its clipping, and weights and optimizer state after three steps.",
        epilog=EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="RUN", nargs="?", help="run file, recipe, or Hugging Face folder"
    )
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="such as layout.zero=3")
    parser.add_argument(
        "--layout",
        metavar="SIZES",
        action="append",
        help='axis sizes, such as "tp2 pp2 ep4"; repeatable (default: the run\'s own)',
    )
    parser.add_argument("--world", metavar="N", type=int, help="ranks (default: the fewest)")
    parser.add_argument(
        "--as-run",
        action="store_true",
        help="in the run's own number format: within ten times what reordered sums differ by",
    )
    parser.add_argument(
        "--matrix",
        metavar="RULE",
        nargs="*",
        help="the release's layouts instead of a run's: all, or those of some rules",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="with --matrix: one step in this format, held against fp64",
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="then break each exchange between ranks once, and show that this is noticed",
    )
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.cli._verify import verify

    return verify(args)
