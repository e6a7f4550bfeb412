"""Arguments of the commands that generate text."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.checkpoint.folder import resolve_checkpoint
from moefold.checkpoint.manifest import read
from moefold.cli._common import add_plugins
from moefold.data.chats.replies import ANSWER
from moefold.data.chats.template_names import check_values, parse_values, template_variables
from moefold.data.corpora.records import BadDocument
from moefold.data.tokenizer import from_path
from moefold.data.tokenizer_files import TokenizerFiles
from moefold.model.families.peft import base_folder, is_hub_folder

if TYPE_CHECKING:
    from moefold.training.generation_settings import Settings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model's folder and the sampling options."""
    text = "a run's folder, a checkpoint, a Hugging Face folder, or a PEFT adapter's folder"
    parser.add_argument("checkpoint", metavar="FOLDER", help=text)
    text = "system message at the start of the conversation (default: none)"
    parser.add_argument("--system", metavar="TEXT", help=text)
    text = "maximum new tokens (default: FOLDER's, else 128, for chat 1024)"
    parser.add_argument("--tokens", metavar="N", type=int, help=text)
    text = "sampling temperature; 0 is greedy (default: FOLDER's, else 0.8)"
    parser.add_argument("--temperature", metavar="T", type=float, help=text)
    text = "sample from the top tokens with total probability P (default: FOLDER's, else 0.95)"
    parser.add_argument("--top-p", metavar="P", type=float, help=text)
    text = "sample from the N most probable tokens (default: FOLDER's, else all)"
    parser.add_argument("--top-k", metavar="N", type=int, help=text)
    text = "sample from tokens at least P times as probable as the likeliest (default: FOLDER's)"
    parser.add_argument("--min-p", metavar="P", type=float, help=text)
    text = "divides logits of tokens that the text has already (default: FOLDER's, else 1)"
    parser.add_argument("--repetition-penalty", metavar="X", type=float, help=text)
    text = "value for a variable of the chat template, as JSON, such as enable_thinking=false; "
    text += "repeatable (default: what all training conversations had)"
    parser.add_argument(
        "--template-value", metavar="NAME=VALUE", action="append", default=[], help=text
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed")
    add_plugins(parser)


def check_options(args: argparse.Namespace) -> Path:
    """Check the arguments; return the model's folder."""
    if args.tokens is not None and args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: must be at least 1")
    if args.temperature is not None and not args.temperature >= 0:
        raise ValueError(f"--temperature {args.temperature}: must be at least 0 (greedy)")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: must be above 0 and at most 1")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k {args.top_k}: must be at least 1")
    if args.min_p is not None and not 0 <= args.min_p <= 1:
        raise ValueError(f"--min-p {args.min_p}: must be at least 0 and at most 1")
    if args.repetition_penalty is not None and not args.repetition_penalty > 0:
        raise ValueError(f"--repetition-penalty {args.repetition_penalty}: must be above 0")
    values = parse_values(args.template_value)
    path = Path(args.checkpoint)
    path = path if is_hub_folder(path) else resolve_checkpoint(path)
    if values:
        _check_values(values, path)
    return path


def _check_values(values: Mapping[str, Any], path: Path) -> None:
    """Raise ``ValueError`` for the first value that a folder's chat template does not read."""
    if is_hub_folder(path):
        folder = path if (path / "tokenizer.json").is_file() else base_folder(path)
        files = from_path(str(folder)).files
    else:
        stored = read(path).meta.get("tokenizer") or {}
        files = TokenizerFiles(stored.get("files") or {})
    known = template_variables(files.chat_template() or "")
    try:
        check_values(values, known, "--template-value")
    except BadDocument as error:
        raise ValueError(f"{path}: {': '.join(error.args)}") from error


def default_tokens(args: argparse.Namespace, settings: "Settings", otherwise: int) -> int:
    """Return the maximum number of new tokens: the flag's, the folder's, or another one."""
    return args.tokens or settings.tokens or otherwise


def mark_part(kind: str, before: str | None) -> str:
    """Return the mark to print before a part of a reply; none before a reply without reasoning."""
    if kind == before or (before is None and kind == ANSWER):
        return ""
    return f"{'' if before is None else chr(10)}[{kind}] "


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options, None where unset."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    return {name: getattr(args, name) for name in names}


def first_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the initial messages of a conversation: the system message, if any."""
    return [{"role": "system", "content": args.system}] if args.system else []
