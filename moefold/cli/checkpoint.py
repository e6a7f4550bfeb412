"""``moefold checkpoint``: show what a checkpoint holds, or check it for damage.

Reads a checkpoint, or the newest one in a run's folder or a folder of checkpoints.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import find_newest, is_checkpoint, list_candidates
from moefold.checkpoint.manifest import Manifest
from moefold.checkpoint.verify import verify
from moefold.cli._common import add_json, on_stderr, plain_table, print_json, progress_bars
from moefold.training.formatting import plural, size

INTACT = 0
DAMAGED = 1
"""Exit status: all bytes are as written, or there is damage."""
ROWS = 40
LONG_TEXT = 200


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("inspect", "lists tensors, shards and metadata; reads only the manifest"),
        ("verify", "reads every byte and compares it with its SHA-256; exit status 1 on damage"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        text = "a checkpoint, or a run's folder"
        action.add_argument("path", metavar="PATH", type=Path, help=text)
        add_json(action)
        if name == "inspect":
            action.add_argument("--all", action="store_true", help="list all tensors, however many")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status. With ``--json``, errors are printed as JSON too."""
    try:
        path = find_checkpoint(args.path)
        return _inspect(path, args) if args.action == "inspect" else _verify(path, args)
    except CheckpointError as error:
        if args.json:
            print_json({"path": str(args.path), "error": str(error)})
        raise


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest one in a run or checkpoint folder."""
    if is_checkpoint(path):
        return path
    for folder in (path, path / "checkpoints"):
        if list_candidates(folder):
            found = find_newest(
                folder, warn=lambda text: on_stderr().print(Text(text, style="yellow"))
            )
            if found is not None:
                return found
    return path


def _inspect(path: Path, args: argparse.Namespace) -> int:
    saved = manifest.read(path)
    if args.json:
        print_json(_manifest_json(path, saved))
        return INTACT
    console = Console(soft_wrap=True)
    count = len(saved.tensors)
    head = (
        f"{path}\nstep {saved.step} · {count} tensors · {size(saved.size)} in "
        f"{plural(len(saved.shards), 'shard')} · format version {saved.version} · {saved.writer}"
    )
    console.print(Text(head))
    rows = []
    for name, stored in list(saved.tensors.items())[: None if args.all else ROWS]:
        files = {Path(saved.shards[part.shard].file).stem for part in stored.slices}
        shape = str(list(stored.shape))
        rows.append((name, stored.dtype, shape, size(stored.size), ", ".join(sorted(files))))
    console.print(plain_table("tensor", "dtype", "shape", "size", "shard", rows=rows))
    if len(rows) < count:
        console.print(f"… and {count - len(rows)} more; --all lists them")
    if saved.meta:
        console.print(Text("meta " + json.dumps(_short(saved.meta), ensure_ascii=True, indent=1)))
    return INTACT


def _short(value: Any) -> Any:
    """Truncate long texts in metadata, such as a tokenizer, and add their length."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]}… ({len(value):,} characters; --json shows all)"
    return value


def _verify(path: Path, args: argparse.Namespace) -> int:
    try:
        total = manifest.read(path).size
    except CheckpointError:  # verify reports it
        total = 0
    done = 0
    with progress_bars(on_stderr()) as show:

        def advance(read: int) -> None:
            nonlocal done
            done += read
            show("verifying", done, total)

        problems = verify(path, advance)
    if args.json:
        rows = [{"file": p.file, "tensor": p.tensor, "what": p.what} for p in problems]
        print_json({"path": str(path), "whole": not problems, "problems": rows})
        return DAMAGED if problems else INTACT
    console = Console(soft_wrap=True)
    for problem in problems:
        console.print(Text(str(problem), style="red"))
    if problems:
        text = plural(len(problems), "problem")
        style = "red"
    else:
        tensors = plural(len(manifest.read(path).tensors), "tensor")
        text = f"every byte is as written ({tensors}, {size(total)})"
        style = "green"
    console.print(Text(f"{path}: {text}", style=style))
    return DAMAGED if problems else INTACT


def _manifest_json(path: Path, saved: Manifest) -> dict[str, Any]:
    """Return the output of ``inspect --json``: the manifest, with sizes and digests per tensor."""
    tensors = {}
    for name, stored in saved.tensors.items():
        slices = [
            {
                "at": list(part.at),
                "shape": list(part.shape),
                "shard": saved.shards[part.shard].file,
                "span": list(part.span),
                "sha256": part.digest,
            }
            for part in stored.slices
        ]
        facts = {"dtype": stored.dtype, "shape": list(stored.shape), "bytes": stored.size}
        tensors[name] = facts | {"slices": slices}
    header = {
        name: getattr(saved, name) for name in ("sha256", "format", "version", "writer", "step")
    }
    shards = [shard.model_dump(mode="json") for shard in saved.shards]
    rest = {"bytes": saved.size, "shards": shards, "tensors": tensors, "meta": saved.meta}
    return {"path": str(path), **header, **rest}
