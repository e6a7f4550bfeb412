"""``moefold train``: trains a run, or continues it."""

import argparse
from typing import Any

EXIT = """exit status:
  0   the run is at its last step, or --dry-run found nothing to mend
  2   wrong input
  3   a policy stopped it: a step that is not finite, or collapsed routing
  75  a signal stopped it; it saved, and --folder goes on from there"""


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a run, or continue it",
        description="Trains a run. Output goes to a new folder runs/NAME, or to --folder, where a "
        "run found there is continued; RUN can then be left out.",
        epilog=EXIT,
    )
    parser.add_argument(
        "source", metavar="RUN", nargs="?", help="run file, recipe, or Hugging Face folder"
    )
    parser.add_argument("overrides", metavar="k=v", nargs="*", help="such as train.steps=100")
    parser.add_argument("--dry-run", action="store_true", help="stop after the banner")
    parser.add_argument(
        "--folder",
        metavar="OUT",
        help="where to; a run there is continued (default: a new one in runs/)",
    )
    parser.add_argument(
        "--until", metavar="STEP", type=int, help="save and stop at this step (default: the last)"
    )
    parser.add_argument(
        "--fork",
        metavar="NEW",
        help="start a new run here from the newest checkpoint of --folder, which may be an "
        "imported one (default: start none)",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="with --fork: leave optimizer state and progress, begin at step 0",
    )
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="with --fork: allow another tokenizer"
    )
    parser.add_argument(
        "--layout", metavar="SIZES", help='axis sizes, such as "tp2 pp2 ep4" (default: the run\'s)'
    )
    parser.add_argument("--nproc", metavar="N", type=int, help="ranks started here (default: 1)")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    from moefold.cli._asked import asked

    run, spot = asked(args)
    from moefold.cli._train import train

    return train(run, spot, args)
