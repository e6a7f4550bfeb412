"""``moefold sample``: text from a checkpoint."""

import argparse
from typing import Any

from moefold.cli._arguments import add_uses


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "sample",
        help="text from a checkpoint",
        description="Continues prompts with the model of a checkpoint, or of a run's newest one.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint or a run's folder")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="text to go on from; repeatable (default: none)",
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="new tokens at most")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0 takes the likeliest"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=0.95, help="probability drawn from"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="same seed, same text")
    add_uses(parser)
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    _check(args)
    from moefold.cli._sample import sample

    return sample(args)


def _check(args: argparse.Namespace) -> None:
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: at least 1")
    if args.temperature < 0:
        raise ValueError(f"--temperature {args.temperature}: 0 (the likeliest token) or more")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: above 0, and at most 1 (every token)")
