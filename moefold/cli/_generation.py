"""Arguments of the commands that generate text."""

import argparse
from pathlib import Path
from typing import Any

from moefold.checkpoint.folder import resolve_checkpoint
from moefold.cli._common import add_plugins
from moefold.model.families.peft import is_hub_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model's folder and the sampling options."""
    text = "a run's folder, a checkpoint, a Hugging Face folder, or a PEFT adapter's folder"
    parser.add_argument("checkpoint", metavar="FOLDER", help=text)
    text = "system message at the start of the conversation (default: none)"
    parser.add_argument("--system", metavar="TEXT", help=text)
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="maximum new tokens")
    text = "sampling temperature; 0 is greedy (default: FOLDER's, else 0.8)"
    parser.add_argument("--temperature", metavar="T", type=float, help=text)
    text = "sample from the top tokens with total probability P (default: FOLDER's, else 0.95)"
    parser.add_argument("--top-p", metavar="P", type=float, help=text)
    text = "sample from the N most probable tokens (default: FOLDER's, else all)"
    parser.add_argument("--top-k", metavar="N", type=int, help=text)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed")
    add_plugins(parser)


def check_options(args: argparse.Namespace) -> Path:
    """Check the arguments; return the model's folder."""
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: must be at least 1")
    if args.temperature is not None and not args.temperature >= 0:
        raise ValueError(f"--temperature {args.temperature}: must be at least 0 (greedy)")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: must be above 0 and at most 1")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k {args.top_k}: must be at least 1")
    path = Path(args.checkpoint)
    return path if is_hub_folder(path) else resolve_checkpoint(path)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options, None where unset."""
    return {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "seed")}


def first_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the initial messages of a conversation: the system message, if any."""
    return [{"role": "system", "content": args.system}] if args.system else []
