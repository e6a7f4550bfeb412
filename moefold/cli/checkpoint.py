"""``moefold checkpoint``: what a checkpoint holds, and whether every byte is as written."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import candidates, newest
from moefold.checkpoint.manifest import Manifest
from moefold.checkpoint.verify import Problem, inspect, verify

WHOLE, DAMAGED = 0, 1
"""Exit status: every byte is right, or something is not as written."""
ROWS = 40
LONG_TEXT = 200
BAR_FROM_BYTES = 256 * 2**20


def add(subparsers: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="what a checkpoint holds; whether every byte is as written",
        description="Looks at a checkpoint, or at the newest one in a folder of checkpoints.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("inspect", "lists tensors, shards and facts; reads the manifest only"),
        ("verify", "reads every byte and compares it with its SHA-256; exit status 1 on damage"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "path", metavar="PATH", type=Path, help="a checkpoint, or a run's folder"
        )
        action.add_argument("--json", action="store_true", help="answer as one JSON object")
        if name == "inspect":
            action.add_argument("--all", action="store_true", help="list every tensor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command and return its exit status.

    Raises ``CheckpointError`` where there is nothing that can be looked at, which ``--json`` also
    answers as an object.
    """
    console = Console(soft_wrap=True)
    notes = Console(stderr=True, soft_wrap=True)
    try:
        path = find(args.path, notes)
        if args.action == "inspect":
            return _inspect(path, args, console)
        return _verify(path, args, console, notes)
    except CheckpointError as error:
        if args.json:
            console.print_json(data={"path": str(args.path), "error": str(error)})
        raise


def find(path: Path, notes: Console) -> Path:
    """Return the checkpoint at ``path``, or the newest of a run's or a folder of checkpoints."""
    if (path / manifest.FILE).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if candidates(folder):
            found = newest(folder, say=lambda text: notes.print(Text(text, style="yellow")))
            if found is not None:
                return found
    return path


def _inspect(path: Path, args: argparse.Namespace, console: Console) -> int:
    found = inspect(path)
    if args.json:
        console.print_json(data=_facts(path, found))
        return WHOLE
    count = len(found.tensors)
    head = (
        f"{path}\nstep {found.step} · {count} tensors · {_size(found.size)} in "
        f"{len(found.shards)} shards · format version {found.version} · {found.writer}"
    )
    console.print(Text(head))
    table = Table("tensor", "dtype", "shape", "size", "shard", box=None, pad_edge=False)
    shown = list(found.tensors.items())[: None if args.all else ROWS]
    for name, stored in shown:
        files = sorted({found.shards[part.shard].file for part in stored.slices})
        cells = (name, stored.dtype, str(list(stored.shape)), _size(stored.size), ", ".join(files))
        table.add_row(*map(Text, cells))
    console.print(table)
    if len(shown) < count:
        console.print(f"… and {count - len(shown)} more; --all lists them")
    if found.meta:
        console.print(Text("meta " + json.dumps(_short(found.meta), ensure_ascii=True, indent=1)))
    return WHOLE


def _short(value: Any) -> Any:
    """Return meta data for people: a long text, such as a tokenizer, by its length alone."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]}… ({len(value):,} characters; --json has them)"
    return value


def _verify(path: Path, args: argparse.Namespace, console: Console, notes: Console) -> int:
    problems = _verified(path, notes)
    whole = not problems
    if args.json:
        rows = [vars(problem) for problem in problems]
        console.print_json(data={"path": str(path), "whole": whole, "problems": rows})
        return WHOLE if whole else DAMAGED
    for problem in problems:
        console.print(Text(str(problem), style="red"))
    if whole:
        found = inspect(path)
        text = f"{path}: every byte is as written ({len(found.tensors)} tensors"
        console.print(Text(f"{text}, {_size(found.size)})", style="green"))
        return WHOLE
    plural = "s" if len(problems) > 1 else ""
    console.print(Text(f"{path}: {len(problems)} problem{plural}", style="red"))
    return DAMAGED


def _verified(path: Path, notes: Console) -> list[Problem]:
    """Verify with a bar on a terminal where it takes long, without one elsewhere."""
    try:
        total = inspect(path).size
    except CheckpointError:  # verify tells what is wrong
        total = 0
    if total < BAR_FROM_BYTES or not sys.stderr.isatty():
        return verify(path)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("verifying", total=total)
        return verify(path, lambda count: bar.advance(task, count))


def _facts(path: Path, found: Manifest) -> dict[str, Any]:
    """Return what ``inspect --json`` answers: the manifest, sizes and digests per tensor."""
    tensors = {
        name: {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "bytes": stored.size,
            "slices": [
                {
                    "at": list(part.at),
                    "shape": list(part.shape),
                    "shard": found.shards[part.shard].file,
                    "span": list(part.span),
                    "sha256": part.digest,
                }
                for part in stored.slices
            ],
        }
        for name, stored in found.tensors.items()
    }
    return {
        "path": str(path),
        "sha256": found.sha256,
        "format": found.format,
        "version": found.version,
        "writer": found.writer,
        "step": found.step,
        "bytes": found.size,
        "shards": [shard.model_dump(mode="json") for shard in found.shards],
        "tensors": tensors,
        "meta": found.meta,
    }


def _size(count: int) -> str:
    """Return a number of bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
