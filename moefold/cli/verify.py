"""``moefold verify``: proves that layouts do not change the maths of a run."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moefold.run import Run

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
    parser.add_argument(
        "--world", metavar="N", type=int, help="ranks (default: the fewest that fit)"
    )
    parser.add_argument(
        "--as-run",
        action="store_true",
        help="in the run's own number format: within ten times what reordered sums differ by",
    )
    parser.add_argument(
        "--matrix",
        metavar="RULE",
        nargs="*",
        help="the release's layouts instead of a run's: all, or those of some rules "
        "(default: a run's)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="with --matrix: one step in this format, held against fp64 (default: three, in fp64)",
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="then break each exchange between ranks once, and show that this is noticed",
    )
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    run = _asked(args)
    from moefold.cli._verify import verify

    return verify(run, args)


def _asked(args: argparse.Namespace) -> "Run | None":
    """Return the run to prove, or None for the matrix, whose arguments are right then."""
    from moefold.proof.matrix import RULES
    from moefold.run import load_run

    if args.matrix is None:
        if args.source is None:
            raise ValueError("name a RUN, or give --matrix for the release's own layouts")
        if args.precision is not None:
            raise ValueError("--precision goes with --matrix; a RUN has its own: --as-run")
        return load_run(args.source, args.overrides)
    if args.source is not None or args.layout or args.as_run:
        raise ValueError("--matrix has its own models and layouts: give no RUN, --layout, --as-run")
    unknown = [name for name in args.matrix if name not in RULES]
    if unknown:
        raise ValueError(f"--matrix {unknown[0]}: no such rule; there are {', '.join(RULES)}")
    return None
