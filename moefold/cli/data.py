"""``moefold data``: make indexed token files from text, and inspect them.

Makes and inspects indexed token files (Megatron's .bin and .idx), converts tokenizers of other
libraries, and makes sample conversations.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from moefold.cli._common import add_json, on_stderr, plain_table, print_json, progress_bars
from moefold.config.load import load
from moefold.data.config import Data, DataError
from moefold.data.corpora.docstrings import write_chats
from moefold.data.foreign_tokenizers import PATTERNS, write_tokenizer
from moefold.data.index import Corpus, IndexedDataset, is_token_index, read_metadata
from moefold.data.packing import REJECTED
from moefold.data.prepare import MASK, PreparedData, open_mask, prepare
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.run import load_run
from moefold.training.formatting import escape_control, plural

INTACT = 0
DAMAGED = 1
MAX_SHOWN = 200
FLAGS = ("text", "jsonl", "parquet", "webdataset")
"""Kinds of sources that a flag of ``data prepare`` names."""
READ_TOKENS = 1 << 22
"""Number of tokens read at a time."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "reads sources, trains or loads a tokenizer, and writes token files"
    make = actions.add_parser("prepare", help=text, description=text)
    make.add_argument("what", metavar="RUN", nargs="?", help="run whose data is prepared")
    make.add_argument("overrides", metavar="k=v", nargs="*", help="override of the run")
    for kind in FLAGS:
        text = f"{kind} files or patterns; repeatable (default: none)"
        make.add_argument(f"--{kind}", metavar="FILES", action="append", default=[], help=text)
    make.add_argument("--stdlib", action="store_true", help="read Python's standard library")
    text = "JSON field or Parquet column with the text (default: text)"
    make.add_argument("--field", metavar="NAME", help=text)
    text = "member of a WebDataset sample with the text (default: txt)"
    make.add_argument("--member", metavar="NAME", help=text)
    text = "what to do with documents that cannot be read (default: refuse)"
    make.add_argument("--bad", choices=("refuse", "skip"), help=text)
    text = "share of documents kept for validation (default: 0)"
    make.add_argument("--holdout", metavar="SHARE", type=float, help=text)
    text = "train a BPE tokenizer with N tokens (default: 2048)"
    make.add_argument("--vocab", metavar="N", type=int, help=text)
    text = "use this tokenizer.json or its folder (default: train one)"
    make.add_argument("--tokenizer", metavar="PATH", help=text)
    text = "output folder; runs in runs/NAME reuse the data in runs/.prepared"
    make.add_argument("--folder", metavar="OUT", default="data", help=text)
    add_json(make)
    text = "makes conversations from the docstrings of Python's library, to try fine-tuning with"
    chats = actions.add_parser("chats", help=text, description=text)
    chats.add_argument("file", metavar="FILE", type=Path, help="JSON Lines file to create")
    chats.add_argument("--number", metavar="N", type=int, default=2000, help="how many to make")
    text = "converts a SentencePiece, tiktoken or tekken file to a tokenizer.json with the same ids"
    convert = actions.add_parser("tokenizer", help=text, description=text)
    convert.add_argument("file", metavar="FILE", type=Path, help="the file to convert")
    text = "folder to write to (default: the file's own)"
    convert.add_argument("--folder", metavar="OUT", type=Path, help=text)
    text = f"how words of a tiktoken file are split: {', '.join(PATTERNS)}, or an expression "
    text += "(default: none)"
    convert.add_argument("--pattern", metavar="P", help=text)
    text = "checks token files and shows what they hold; exit status 1 if they are damaged"
    look = actions.add_parser("inspect", help=text, description=text)
    text = "path of the files without .bin or .idx, or a folder with such files"
    look.add_argument("prefix", metavar="PREFIX", help=text)
    look.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json (default: beside PREFIX)")
    text = "also show the text of document N, from 0 (default: none)"
    look.add_argument("--document", metavar="N", type=int, help=text)
    add_json(look)


def run(args: argparse.Namespace) -> int:
    """Make or inspect token files; the exit status is 1 if inspected files are damaged."""
    if args.action == "inspect":
        return _inspect(args)
    if args.action == "tokenizer":
        folder = args.folder or args.file.parent
        n = write_tokenizer(args.file, folder, args.pattern)
        print(f"{n} tokens in {folder / 'tokenizer.json'}, which gives the ids of {args.file}")
        return INTACT
    if args.action == "chats":
        print(f"{write_chats(args.file, args.number)} conversations in {args.file}")
        return INTACT
    with progress_bars(on_stderr(), log_stages=True) as progress:
        prepared = prepare(_data_record(args), args.folder, progress)
    facts = _prepared_json(prepared)
    if args.json:
        print_json(facts)
        return INTACT
    console = Console(soft_wrap=True)
    tokenizer = facts["tokenizer"]
    head = f"tokenizer: {tokenizer['size']} tokens · {tokenizer['fingerprint'][:12]}"
    console.print(Text(f"{head} · all prepared in {facts['seconds']:.1f} s"))
    if tokenizer["ends"][1:]:
        console.print(Text(f"texts end with {' or '.join(tokenizer['ends'])}"))
    for note in tokenizer["notes"]:
        console.print(Text(f"tokenizer: {note}", style="yellow"))
    rows = []
    figures = ("documents", "tokens", "bytes")
    for part in facts["parts"]:
        ratio = "" if part["bytes_per_token"] is None else f"{part['bytes_per_token']:.3f}"
        rows.append((part["source"], part["side"], *(f"{part[n]:,}" for n in figures), ratio))
    titles = ("source", "side", *figures, "bytes/token")
    console.print(plain_table(*titles, right=titles[2:], rows=rows))
    console.print(Text(f"files: {facts['folder']}/SOURCE.SIDE.bin and .idx"))
    for name, reasons in facts["skipped"].items():
        for reason, left_out in reasons.items():
            first = ", ".join(left_out["first"][:3])
            number = plural(left_out["count"], left_out.get("unit", "document"))
            text = f"{name}: {number} left out, {reason}: {first}"
            console.print(Text(text, style="yellow"))
    return INTACT


# ------------------------------------------------------------------------------------ prepare


def _data_record(args: argparse.Namespace) -> Data:
    """Return the data that the arguments select: a run's, or the sources they name."""
    columns = {"jsonl": {"field": args.field}, "parquet": {"column": args.field}}
    columns["webdataset"] = {"field": args.field, "member": args.member}
    sources = [
        {"source": source, "files": files, "bad": args.bad, **columns.get(source, {})}
        for source in FLAGS
        if (files := getattr(args, source))
    ]
    sources += [{"source": "python_stdlib"}] if args.stdlib else []
    if args.what is not None:
        options = (args.field, args.member, args.bad, args.holdout, args.vocab, args.tokenizer)
        if sources or any(option is not None for option in options):
            raise DataError("give a run, or sources with their options, not both")
        return load_run(args.what, args.overrides).data
    if not sources:
        flags = ", ".join(f"--{kind}" for kind in FLAGS)
        raise DataError(f"nothing to read: give a run, {flags} or --stdlib")
    if None not in (args.vocab, args.tokenizer):
        raise DataError("--vocab trains a tokenizer, --tokenizer loads one: give only one of them")
    tokenizer = {"kind": "bpe", "vocab": args.vocab}
    if args.tokenizer is not None:
        tokenizer = {"kind": "file", "path": args.tokenizer}
    train = [_drop_none({**source, "holdout": args.holdout}) for source in sources]
    return load(Data, {"seq": 2, "tokenizer": _drop_none(tokenizer), "train": train}).record


def _drop_none(raw: dict[str, Any]) -> dict[str, Any]:
    """Drop a raw record's None fields, so that they get their defaults."""
    return {name: value for name, value in raw.items() if value is not None}


def _prepared_json(prepared: PreparedData) -> dict[str, Any]:
    tokenizer = prepared.tokenizer
    parts = [
        {
            "source": part.name,
            "side": side,
            "documents": part.corpus.n_documents,
            "tokens": part.corpus.n_tokens,
            "bytes": part.n_bytes,
            "bytes_per_token": part.n_bytes / part.corpus.n_tokens if part.n_bytes else None,
            "prefix": str(part.corpus.dataset.bin.with_suffix("")),
        }
        for side, parts in (("train", prepared.train), ("valid", prepared.valid))
        for part in parts
    ]
    return {
        "folder": str(prepared.folder),
        "seconds": prepared.seconds,
        "fingerprint": prepared.fingerprint(),
        "tokenizer": {
            name: getattr(tokenizer, name)
            for name in ("size", "vocab", "fingerprint", "ends", "notes")
        },
        "parts": parts,
        "skipped": prepared.skipped,
    }


# ------------------------------------------------------------------------------------ inspect


def _inspect(args: argparse.Namespace) -> int:
    """Print the content of a pair of token files, or of every pair in a folder, recursively."""
    console = Console(soft_wrap=True)
    folder = Path(args.prefix).is_dir()
    prefixes = [args.prefix]
    if folder:
        results = filter(is_token_index, Path(args.prefix).rglob("*.idx"))
        prefixes = sorted(str(idx.with_suffix("")) for idx in results)
        prefixes = [prefix for prefix in prefixes if not prefix.endswith(MASK)]
        if not prefixes:
            raise DataError(f"{args.prefix}: no token files (.bin and .idx) in this folder")
        if args.document is not None:
            raise DataError(f"--document needs one pair of files, such as {prefixes[0]}")
    results = [inspect(prefix, _find_tokenizer(args, prefix)) for prefix in prefixes]
    ids = list[int]()
    text = None
    trained = None
    tokenizer = None if folder else _find_tokenizer(args, args.prefix)
    if args.document is not None:
        if not 0 <= args.document < results[0]["documents"]:
            raise DataError(f"--document {args.document}: not in [0, {results[0]['documents']})")
        ids = IndexedDataset(args.prefix).document(args.document).tolist()
        text = None if tokenizer is None else tokenizer.decode(ids, special=True)
        if (mask := open_mask(args.prefix)) is not None:
            trained = mask.document(args.document).tolist()
    if args.json:
        document = {"text": text} | ({} if trained is None else {"ids": ids, "trained": trained})
        print_json({"files": results} if folder else results[0] | document)
    else:
        for line in (line for result in results for line in _describe(result)):
            console.print(line)
        if ids and tokenizer is not None and trained is not None:
            console.print(_render_mask(tokenizer, ids, trained, console.is_terminal))
        elif ids:
            more = " …" if len(ids) > MAX_SHOWN else ""
            shown = " ".join(map(str, ids[:MAX_SHOWN])) + more
            console.print(Text(shown if text is None else text))
    return DAMAGED if any(result["as_written"] is False for result in results) else INTACT


def _render_mask(
    tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int], in_colour: bool
) -> Text:
    """Render a document with its labels in colour, or in brackets if not ``in_colour``."""
    shown = Text()
    at = 0
    for value, run in groupby(mask):
        n = len(list(run))
        text = escape_control(tokenizer.decode(ids[at : at + n], special=True))
        if value % REJECTED:
            style = "bold green" if value < REJECTED else "bold red"
            shown.append(text if in_colour else f"⟦{text}⟧", style)
        else:
            shown.append(text, "dim")
        at += n
    return shown


def inspect(prefix: str | Path, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Read token files completely and return facts about them.

    ``lowest`` and ``highest`` are token ids, -1 if there are no tokens; ``shortest``, ``median``
    and ``longest`` are lengths of documents in tokens; ``said`` is the content of the JSON file
    next to them, empty if there is none; ``as_written`` is whether the files and the mask match
    the digests in that file, None if it has none. Every id must be one of the tokenizer's, if any.

    Raises:
        DataError: if the index is inconsistent, or an id is not one of the tokenizer's.
    """
    indexed = IndexedDataset(prefix)
    bounds: list[int] = []
    for start in range(0, indexed.n_tokens, READ_TOKENS):
        ids = indexed.read(start, min(start + READ_TOKENS, indexed.n_tokens))
        bounds += int(ids.min()), int(ids.max())
    if tokenizer is not None and bounds and (min(bounds) < 0 or max(bounds) >= tokenizer.size):
        for _ in Corpus(str(prefix), indexed, tokenizer.size).slice(0, indexed.n_tokens):
            pass  # raises for the first invalid id, with its document and position
    lengths = np.diff(indexed.document_starts_1)
    metadata = read_metadata(prefix)
    as_written = None
    if "digest" in metadata:
        mask = open_mask(prefix) if "mask" in metadata else None
        same = mask is None or mask.digest(full=True) == metadata["mask"]
        as_written = same and indexed.digest(full=True) == metadata["digest"]
    return {
        "bin": str(indexed.bin),
        "documents": len(indexed),
        "empty": int(np.count_nonzero(lengths == 0)),
        "tokens": indexed.n_tokens,
        "dtype": indexed.dtype.name,
        "lowest": min(bounds, default=-1),
        "highest": max(bounds, default=-1),
        "shortest": int(lengths.min(initial=indexed.n_tokens)),
        "median": float(np.median(lengths)) if len(lengths) else 0.0,
        "longest": int(lengths.max(initial=0)),
        "file_bytes": indexed.bin.stat().st_size + indexed.idx.stat().st_size,
        "said": metadata,
        "as_written": as_written,
    }


def _find_tokenizer(args: argparse.Namespace, prefix: str) -> Tokenizer | None:
    """Return the tokenizer of ``--tokenizer``, else the one next to the files, else None."""
    default = Path(prefix).parent / "tokenizer.json"
    if args.tokenizer is not None:
        return from_path(args.tokenizer)
    return from_path(str(default)) if default.is_file() else None


def _describe(facts: dict[str, Any]) -> Iterator[Text]:
    yield Text(facts["bin"].removesuffix(".bin"))
    yield Text("{documents:,} documents ({empty:,} empty) · {tokens:,} tokens".format(**facts))
    lengths = "documents of {shortest:,} to {longest:,} tokens, median {median:,.0f}"
    yield Text(lengths.format(**facts))
    size = f"{facts['file_bytes'] / 1e6:.1f} MB in both files"
    yield Text("ids {lowest} to {highest} as {dtype}".format(**facts) + f" · {size}")
    if n_bytes := facts["said"].get("bytes"):
        per_token = n_bytes / max(facts["tokens"], 1)
        yield Text(f"{n_bytes:,} bytes of text, {per_token:.3f} per token")
    state = {None: "not checked (no digest stored)", True: "as written", False: "DAMAGED"}
    yield Text(f"bytes: {state[facts['as_written']]}")
    if facts["as_written"] is False:
        yield Text("the files differ from their stored digest: prepare them again", style="red")
