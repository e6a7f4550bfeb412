"""``moefold export``: convert a checkpoint to a Hugging Face folder.

Writes config.json, safetensors and the tokenizer's files. For a run that trained adapters it writes
only the adapters, in PEFT's format, or with --merged the whole model with the adapters merged in.
A model card, README.md, has data, figures, layout and how to serve the model; the base model's card
is kept as README.base.md.
"""

import argparse
from pathlib import Path

from moefold.checkpoint.folder import resolve_checkpoint
from moefold.cli._common import add_json, add_plugins, print_conversion


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint, or a run's folder")
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path, help="folder to create")
    text = "number format of the weights on disk; float32 is exact"
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help=text)
    text = "one tensor per expert, which most programs read, or one for all experts"
    layouts = ("per_expert", "packed")
    parser.add_argument("--layout", choices=layouts, default="per_expert", help=text)
    text = "for a run with adapters: write the whole model with the adapters merged in"
    parser.add_argument("--merged", action="store_true", help=text)
    text = "write no model card (README.md), which has data, figures, layout and how to serve it"
    parser.add_argument("--no-card", action="store_true", help=text)
    add_plugins(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the folder; print what of the checkpoint it cannot represent."""
    path = resolve_checkpoint(Path(args.checkpoint))  # fails before torch is loaded

    from moefold.api import export

    options = {"merged": args.merged, "card": not args.no_card}
    notes = export(path, args.folder, args.dtype, args.layout, args.uses, **options)
    if not args.no_card:
        notes.append(f"{args.folder / 'README.md'} is a model card; write its licence")
    size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    facts = {"folder": str(args.folder), "dtype": args.dtype, "layout": args.layout, "bytes": size}
    print_conversion(facts | {"notes": notes}, args.json)
    return 0
