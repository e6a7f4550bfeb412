"""``moefold import``: convert a Hugging Face folder to a checkpoint.

Reads config.json, safetensors and tokenizer.json, and writes a checkpoint of step 0. Each tensor is
used once or reported as left out. Code in the folder is never run. Pickle files are read only where
--weights names them, and only objects of allowed types are loaded.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.folder import find_newest
from moefold.cli._common import add_json, add_plugins, on_stderr, print_conversion, progress_bars
from moefold.config.plugins import import_plugins
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.model.families.folder import read_config
from moefold.model.families.peft import base_folder

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.convert.importer import ImportedFolder


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        metavar="HF_FOLDER",
        type=Path,
        help="folder with config.json, or a PEFT adapter's folder",
    )
    text = "folder to create for the checkpoint"
    parser.add_argument("folder", metavar="CHECKPOINT", type=Path, help=text)
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="read weights from here: a .pt or .bin file, a folder of them, or a folder of "
        "torch.distributed.checkpoint; names as in Hugging Face folders (default: HF_FOLDER)",
    )
    for name, verb in (("end", "ends"), ("start", "begins")):
        text = f"token that {verb} a document (default: the folder's)"
        parser.add_argument(f"--{name}", metavar="TOKEN", help=text)
    add_plugins(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the folder's model as a checkpoint of step 0; print what was left out."""
    if find_newest(args.folder) is not None:
        raise ValueError(f"{args.folder} already holds a checkpoint; name a new folder")
    import_plugins(args.uses)
    read_config(base_folder(args.source))  # fails before torch is loaded

    from moefold.checkpoint.save import save
    from moefold.checkpoint.tensors import LazyTensor
    from moefold.convert.importer import import_folder
    from moefold.training.model_card import STORED_CARD, read_base_card
    from moefold.training.model_checkpoint import MODEL_PREFIX, describe_model

    with import_folder(args.source, args.weights) as imported, progress_bars(on_stderr()) as show:
        source = imported.tensors
        count = len(imported.tensors)
        tokenizer = _tokenizer(args, imported)
        meta = describe_model(imported.decoder, tokenizer)
        if tokenizer is None:  # else they are among its files
            meta |= {"special_tokens": dict(imported.special_tokens)}
        if card := read_base_card(args.source):
            meta |= {STORED_CARD: card}

        def read(name: str, number: int) -> "Tensor":
            """Read a tensor of the folder, and advance the progress bar."""
            show("importing", number, count)
            return source[name]

        tensors = {
            MODEL_PREFIX + name: LazyTensor(target.dtype, target.shape, partial(read, name, number))
            for number, (name, target) in enumerate(source.targets.items(), 1)
        }
        path = save(args.folder, 0, tensors, meta)
    facts = {
        "checkpoint": str(path),
        "family": imported.model.model_type,
        "parameters": sum(math.prod(t.shape) for t in tensors.values()),
        "tensors": len(tensors),
        "notes": list(imported.notes),
    }
    print_conversion(facts, args.json)
    return 0


def _tokenizer(args: argparse.Namespace, imported: "ImportedFolder") -> Tokenizer | None:
    """Return the folder's tokenizer, or None.

    Raises:
        ValueError: if no token ends a document, or the embedding has too few rows.
    """
    has_own = (args.source / "tokenizer.json").is_file()
    folder = args.source if has_own else base_folder(args.source)
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = from_path(str(folder), args.end, args.start)
    if tokenizer.size > imported.decoder.vocab:
        raise ValueError(
            f"{args.source}: the tokenizer has ids up to {tokenizer.size - 1}, "
            f"but the embedding has {imported.decoder.vocab} rows"
        )
    return tokenizer
