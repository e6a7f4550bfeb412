"""``moefold import``: a Hugging Face folder becomes a checkpoint, no tensor overlooked."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "import",
        help="turn a Hugging Face folder into a checkpoint",
        description="Reads config.json, safetensors and tokenizer.json. Each tensor is used once "
        "or named as left out; code in the folder is never run, and pickles are read only where "
        "--weights names them, behind a list of what may be in them.",
    )
    parser.add_argument("source", metavar="HF_FOLDER", help="the folder with config.json")
    parser.add_argument("folder", metavar="CHECKPOINT", help="a new folder for the checkpoint")
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="take weights from here instead: a .pt or .bin file, a folder of them, or a folder of "
        "torch.distributed.checkpoint; names as in Hugging Face folders (default: HF_FOLDER's)",
    )
    for name, verb in (("end", "ends"), ("start", "begins")):
        said = f"token that {verb} a document (default: the folder's)"
        parser.add_argument(f"--{name}", metavar="TOKEN", help=said)
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read the folder, write the checkpoint, say what was taken and what was left out."""
    from moefold.cli import _convert

    return _convert.bring_in(args)
