"""What ``moefold data`` does: token files from a run's sources or from files that are named."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moefold.config.load import load
from moefold.data.config import Data, DataError
from moefold.data.index import Indexed
from moefold.data.inspect import Inspection, inspect
from moefold.data.prepare import Part, Prepared, prepare
from moefold.data.prepare import Progress as Told
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.run import load_run
from moefold.training.words import plural

WHOLE, DAMAGED = 0, 1
SHOWN_TOKENS = 200


def make(args: argparse.Namespace) -> int:
    """Prepare data and say what came of it; return the exit status."""
    console = Console(soft_wrap=True)
    with _told(Console(stderr=True, soft_wrap=True)) as progress:
        prepared = prepare(_data(args), args.folder, progress)
    sides = [("train", p) for p in prepared.train] + [("valid", p) for p in prepared.valid]
    if args.json:
        console.print_json(data=_facts(prepared, sides))
        return WHOLE
    tokenizer = prepared.tokenizer
    head = f"tokenizer: {tokenizer.size} tokens · {tokenizer.fingerprint[:12]}"
    console.print(Text(f"{head} · all made in {prepared.seconds:.1f} s"))
    table = Table("source", "side", box=None, pad_edge=False)
    for name in ("documents", "tokens", "bytes", "bytes/token"):
        table.add_column(name, justify="right")
    for side, part in sides:
        row = _row(part)
        ratio = "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.3f}"
        numbers = (f"{row[name]:,}" for name in ("documents", "tokens", "bytes"))
        table.add_row(*map(Text, (part.name, side, *numbers, ratio)))
    console.print(table)
    console.print(Text(f"files: {prepared.folder}/SOURCE.SIDE.bin and .idx"))
    for name, reasons in prepared.skipped.items():
        for reason, left_out in reasons.items():
            first = ", ".join(left_out["first"][:3])
            said = f"{name}: {plural(left_out['count'], 'document')} left out, {reason}: {first}"
            console.print(Text(said, style="yellow"))
    return WHOLE


def _data(args: argparse.Namespace) -> Data:
    """Return the data that the arguments describe: a run's, or the sources they name."""
    given: list[dict[str, Any]] = []
    for source, field in (("text", None), ("jsonl", "field"), ("parquet", "column")):
        if files := getattr(args, source):
            named = {} if field is None else {field: args.field}
            given.append({"source": source, "files": files, "bad": args.bad, **named})
    given += [{"source": "python_stdlib"}] if args.stdlib else []
    if args.what is not None:
        if given or args.vocab or args.tokenizer:
            raise DataError("give a run, or sources and a tokenizer, not both")
        return load_run(args.what, args.overrides).data
    if not given:
        raise DataError("nothing to read: give a run, --text, --jsonl, --parquet or --stdlib")
    if args.vocab and args.tokenizer:
        raise DataError("--vocab trains a tokenizer, --tokenizer takes a ready one: give one")
    tokenizer: dict[str, Any] = {"kind": "bpe", **({"vocab": args.vocab} if args.vocab else {})}
    if args.tokenizer:
        tokenizer = {"kind": "file", "path": args.tokenizer}
    train = [{**source, "holdout": args.holdout} for source in given]
    return load(Data, {"seq": 2, "tokenizer": tokenizer, "train": train}).record


@contextmanager
def _told(notes: Console) -> Iterator[Told]:
    """Give what tells of progress: a bar on a terminal, one line per stage elsewhere."""
    if not sys.stderr.isatty():
        stages: set[str] = set()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages.add(stage)
                notes.print(Text(f"{stage} ({total / 1e6:.1f} MB)"))

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=notes, transient=True) as bar:
        task = bar.add_task("reading")
        yield lambda stage, done, total: bar.update(
            task, description=stage, completed=done, total=total
        )


def _row(part: Part) -> dict[str, Any]:
    corpus = part.corpus
    return {
        "documents": corpus.documents,
        "tokens": corpus.tokens,
        "bytes": part.n_bytes,
        "bytes_per_token": part.n_bytes / corpus.tokens if part.n_bytes else None,
        "prefix": str(corpus.indexed.bin.with_suffix("")),
    }


def _facts(prepared: Prepared, sides: list[tuple[str, Part]]) -> dict[str, Any]:
    return {
        "folder": str(prepared.folder),
        "seconds": prepared.seconds,
        "fingerprint": prepared.fingerprint(),
        "tokenizer": {
            "size": prepared.tokenizer.size,
            "vocab": prepared.tokenizer.vocab,
            "fingerprint": prepared.tokenizer.fingerprint,
        },
        "parts": [{"source": part.name, "side": side, **_row(part)} for side, part in sides],
        "skipped": prepared.skipped,
    }


def look(args: argparse.Namespace) -> int:
    """Say what token files hold; return the exit status."""
    console = Console(soft_wrap=True)
    if Path(args.prefix).is_dir():
        return _look_around(args, console)
    tokenizer = _tokenizer(args, args.prefix)
    found = inspect(args.prefix, tokenizer)
    ids = text = None
    if args.document is not None:
        if not 0 <= args.document < found.documents:
            raise DataError(f"document {args.document} is not in [0, {found.documents})")
        ids = Indexed(args.prefix).document(args.document)
        text = None if tokenizer is None else tokenizer.decode(ids.tolist(), special=True)
    if args.json:
        console.print_json(data=_said(found) | {"text": text})
    else:
        _show(found, console)
        if ids is not None:
            shown = " ".join(map(str, ids[:SHOWN_TOKENS]))
            shown += " …" if len(ids) > SHOWN_TOKENS else ""
            console.print(Text(shown if text is None else text))
    return DAMAGED if found.as_written is False else WHOLE


def _look_around(args: argparse.Namespace, console: Console) -> int:
    """Say what each pair of token files in a folder, and in the folders inside it, holds."""
    prefixes = sorted(str(idx.with_suffix("")) for idx in Path(args.prefix).rglob("*.idx"))
    if not prefixes:
        raise DataError(f"{args.prefix}: holds no token files (.bin and .idx)")
    if args.document is not None:
        raise DataError(f"--document reads one pair of files: name {prefixes[0]}, say")
    found = [inspect(prefix, _tokenizer(args, prefix)) for prefix in prefixes]
    if args.json:
        console.print_json(data={"files": [_said(each) for each in found]})
    else:
        for each in found:
            _show(each, console)
    return DAMAGED if any(each.as_written is False for each in found) else WHOLE


def _said(found: Inspection) -> dict[str, Any]:
    return {**asdict(found), "bin": str(found.bin)}


def _show(found: Inspection, console: Console) -> None:
    for line in _lines(found):
        console.print(Text(line))
    if found.as_written is False:
        text = "the files are not as they were written: make them again"
        console.print(Text(text, style="red"))


def _tokenizer(args: argparse.Namespace, prefix: str) -> Tokenizer | None:
    """Return the tokenizer that was named, or else the one beside the files."""
    beside = Path(prefix).parent / "tokenizer.json"
    if args.tokenizer is not None:
        return from_path(args.tokenizer)
    return from_path(str(beside)) if beside.is_file() else None


def _lines(found: Inspection) -> Iterator[str]:
    yield f"{found.bin.with_suffix('')}"
    yield f"{found.documents:,} documents ({found.empty:,} empty) · {found.tokens:,} tokens"
    yield (
        f"documents of {found.shortest:,} to {found.longest:,} tokens, median {found.median:,.0f}"
    )
    yield (
        f"ids {found.lowest} to {found.highest} as {found.dtype} · "
        f"{found.file_bytes / 1e6:.1f} MB in both files"
    )
    if found.said.get("bytes"):
        ratio = found.said["bytes"] / max(found.tokens, 1)
        yield f"{found.said['bytes']:,} bytes of text, {ratio:.3f} per token"
    state = {None: "not known (no digest beside them)", True: "as written", False: "DAMAGED"}
    yield f"bytes: {state[found.as_written]}"
