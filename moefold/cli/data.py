"""``moefold data``: sources to indexed token files, and what such files hold."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "data",
        help="turn sources into indexed token files; see what such files hold",
        description="Makes and reads indexed token files (Megatron's .bin and .idx).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_prepare(actions)
    text = "reads token files from end to end; exit status 1 where a byte is not as written"
    look = actions.add_parser("inspect", help=text, description=text)
    hint = "path of the files without .bin or .idx, or a folder that holds such files"
    look.add_argument("prefix", metavar="PREFIX", help=hint)
    look.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json (default: beside them)")
    look.add_argument(
        "--document", metavar="N", type=int, help="show the text of document N (default: of none)"
    )
    look.add_argument("--json", action="store_true", help="answer as one JSON object")


def _add_prepare(actions: Any) -> None:
    text = "reads sources, trains or takes a tokenizer, writes token files"
    make = actions.add_parser("prepare", help=text, description=text)
    make.add_argument("what", metavar="RUN", nargs="?", help="prepare the data of this run")
    make.add_argument("overrides", metavar="k=v", nargs="*", help="overrides of the run")
    files = "files or patterns; repeatable (default: none)"
    make.add_argument("--text", metavar="FILES", action="append", default=[], help=files)
    make.add_argument("--jsonl", metavar="FILES", action="append", default=[], help=files)
    make.add_argument("--parquet", metavar="FILES", action="append", default=[], help=files)
    make.add_argument("--stdlib", action="store_true", help="Python's own standard library")
    make.add_argument(
        "--field", metavar="NAME", default="text", help="JSON field or column with the text"
    )
    make.add_argument(
        "--bad", choices=("refuse", "skip"), default="refuse", help="text that cannot be read"
    )
    make.add_argument(
        "--holdout",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of documents kept for validation",
    )
    make.add_argument(
        "--vocab", metavar="N", type=int, help="train a BPE of N tokens (default: 2048)"
    )
    make.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="use this tokenizer.json or its folder (default: train one)",
    )
    make.add_argument("--folder", metavar="OUT", default="data", help="where to")
    make.add_argument("--json", action="store_true", help="answer as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Make token files, or look at some; exit status 1 where a byte is not as written."""
    from moefold.cli import _data

    return _data.make(args) if args.action == "prepare" else _data.look(args)
