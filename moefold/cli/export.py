"""``moefold export``: a checkpoint becomes a Hugging Face folder for transformers."""

import argparse
from typing import Any

from moefold.cli._arguments import add_uses


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "export",
        help="turn a checkpoint into a Hugging Face folder",
        description="Writes config.json, safetensors and the tokenizer's files.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("folder", metavar="HF_FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights on disk; float32 rounds nothing",
    )
    parser.add_argument(
        "--layout",
        choices=("per_expert", "packed"),
        default="per_expert",
        help="experts each on their own, which most programs read, or all in one tensor",
    )
    add_uses(parser)
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the folder, and say what it cannot hold."""
    from moefold.cli import _convert

    return _convert.hand_out(args)
