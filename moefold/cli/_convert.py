"""What ``moefold import`` and ``moefold export`` do."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from torch import Tensor

from moefold.api import export
from moefold.checkpoint.folder import newest
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import Unread
from moefold.convert.importer import FolderTensors, Imported, import_folder
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.training.model_checkpoint import MODEL, describe


def bring_in(args: argparse.Namespace) -> int:
    """Write a Hugging Face folder's model as a checkpoint of step 0; return the exit status."""
    folder, notes = Path(args.folder), Console(stderr=True, soft_wrap=True)
    if newest(folder) is not None:
        raise ValueError(f"{folder} holds a checkpoint already; name a new folder")
    with import_folder(args.source, args.weights) as found:
        tokenizer = _tokenizer(args, found)
        meta = describe(found.decoder, tokenizer) | {"special_tokens": dict(found.special_tokens)}
        with _bar(len(found.tensors), notes) as told:
            tensors = {MODEL + n: _unread(found.tensors, n, told) for n in found.tensors}
            path = save(folder, 0, tensors, meta)
        facts = {
            "checkpoint": str(path),
            "family": found.model.model_type,
            "parameters": sum(math.prod(t.shape) for t in tensors.values()),
            "tensors": len(tensors),
            "notes": list(found.notes),
        }
    _answer(args, facts, facts["notes"], notes)
    return 0


def hand_out(args: argparse.Namespace) -> int:
    """Write a checkpoint's model as a Hugging Face folder; return the exit status."""
    left_out = export(args.checkpoint, args.folder, args.dtype, args.layout, args.uses)
    size = sum(p.stat().st_size for p in Path(args.folder).glob("*.safetensors"))
    facts = {
        "folder": args.folder,
        "dtype": args.dtype,
        "layout": args.layout,
        "bytes": size,
        "notes": left_out,
    }
    _answer(args, facts, left_out, Console(stderr=True, soft_wrap=True))
    return 0


def _tokenizer(args: argparse.Namespace, found: Imported) -> Tokenizer | None:
    """Return the folder's tokenizer, if it has one.

    Raises:
        ValueError: where no token ends a document, or tokens have no row of the embedding.
    """
    if found.tokenizer is None:
        return None
    tokenizer = from_path(args.source, args.end, args.start)
    if tokenizer.size > found.decoder.vocab:
        raise ValueError(
            f"{args.source}: the tokenizer has ids up to {tokenizer.size - 1}, "
            f"but the embedding has {found.decoder.vocab} rows"
        )
    return tokenizer


@contextmanager
def _bar(total: int, console: Console) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; what is yielded is called for each tensor."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("importing", total=total)
        yield lambda: progress.advance(task)


def _unread(tensors: FolderTensors, name: str, told: Callable[[], None]) -> Unread:
    """Return a tensor of the folder that is read when it is written."""

    def read() -> Tensor:
        told()
        return tensors[name]

    return Unread(tensors.dtype(name), tensors.shape(name), read)


def _answer(
    args: argparse.Namespace, facts: dict[str, Any], said: Sequence[str], notes: Console
) -> None:
    console = Console(soft_wrap=True)
    if args.json:
        console.print_json(data=facts)
        return
    for note in said:
        notes.print(Text(f"note: {note}", style="yellow"))
    console.print(Text(" · ".join(f"{k} {v}" for k, v in facts.items() if k != "notes")))
