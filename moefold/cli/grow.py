"""``moefold grow``: grow or shrink an MoE model, or make one from dense models.

A dense model (llama, mistral, qwen3) becomes an MoE model whose experts are copies or slices of its
feed-forwards (upcycling); several dense models become one, each with the same number of experts.
An MoE model gets copies of its experts, more layers or more width without a change of its outputs,
or keeps only the experts that take most tokens of a text. The result is a Hugging Face folder.
"""

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli._common import add_json, add_plugins, print_conversion
from moefold.config.plugins import import_plugins
from moefold.data.tokenizer import from_path
from moefold.files import path_in_errors, read_json
from moefold.model.families.dense import MOE_FAMILY, read_dense
from moefold.model.families.folder import CONFIG_LIMIT, read_config
from moefold.model.families.hub import is_mark

if TYPE_CHECKING:
    from moefold.convert.growth import GrownModel, Growth
    from moefold.convert.importer import ImportedFolder

PIECE = 512
"""Tokens per segment when a text's tokens are counted by expert."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "model folder; several dense models of the same shape are merged"
    parser.add_argument("sources", metavar="HF_FOLDER", nargs="+", type=Path, help=text)
    parser.add_argument("folder", metavar="NEW_FOLDER", type=Path, help="folder to create")
    numbers = {
        "experts": "experts per layer (default: as before; required for a dense model)",
        "top-k": "experts per token (default: two dense copies, else scaled with --experts)",
        "granularity": "experts that each copy of a dense feed-forward is cut into (default: 1)",
        "layers": "number of layers; new ones start without effect (default: as before)",
        "hidden-times": "factor on the hidden size and on heads (default: 1)",
        "width-times": "factor on the feed-forward width (default: 1)",
    }
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", metavar="N", type=_positive_int, help=text)
    text = "scale of cut feed-forwards: keeps the dense output, or the published cube root"
    parser.add_argument("--scale", choices=("exact", "cube_root"), default="exact", help=text)
    text = "weights of a new router's choices: their sum is 1, or they are probabilities over all"
    choices = ("normalised", "pre_softmax")
    parser.add_argument("--routing", choices=choices, default="normalised", help=text)
    text = "with fewer experts: text file whose tokens decide which are kept (default: none)"
    parser.add_argument("--text", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of a new router's weights"
    )
    text = "number format on disk (default: bfloat16 if the first folder has any, else float32)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)
    add_plugins(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the new folder; print what it is and whether it computes what its source does."""
    from moefold.convert.exporter import export_folder, require_new_folder
    from moefold.convert.growth import Growth

    require_new_folder(args.folder)
    import_plugins(args.uses)
    names = ("experts", "top_k", "granularity", "layers", "hidden_times", "width_times")
    sizes = {name: value for name in names if (value := getattr(args, name)) is not None}
    if not sizes:
        raise ValueError("nothing to grow: give --experts, --layers or another size")
    growth = Growth(**sizes, scale=args.scale, routing=args.routing, seed=args.seed)
    with ExitStack() as stack:
        grown, sources = _build_model(args, growth, stack)
        first = sources[0]
        own = (first.source.folder / "tokenizer.json").is_file()
        tokenizer = from_path(str(first.source.folder)) if own else None
        stored = {info.dtype for info in first.source.tensors.values()}
        dtype = args.dtype or ("bfloat16" if "BF16" in stored else "float32")
        notes = export_folder(
            grown.decoder, grown, args.folder, tokenizer, dtype, special_tokens=first.special_tokens
        )
    notes += [
        f"{folder / 'README.md'}, the card of a source, is not copied"
        for folder in args.sources
        if (folder / "README.md").is_file()
    ]
    shape = grown.model.shape
    facts = {"folder": str(args.folder), "family": grown.model.model_type, "layers": shape.layers}
    facts |= {"experts": shape.experts, "top_k": shape.top_k, "dtype": dtype}
    read = [*first.notes, *(note for source in sources[1:] for note in source.left_out)]
    print_conversion(facts | {"notes": [*grown.notes, *read, *notes]}, args.json)
    return 0


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _build_model(
    args: argparse.Namespace, growth: "Growth", stack: ExitStack
) -> tuple["GrownModel", list["ImportedFolder"]]:
    """Build the new model; return it and its sources."""
    from moefold.convert.growth import grow, upcycle
    from moefold.convert.importer import import_folder

    configs = []
    for path in (folder / "config.json" for folder in args.sources):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        configs.append(read_json(path, limit=CONFIG_LIMIT))
    dense = [config.get("model_type") in MOE_FAMILY for config in configs]
    if not all(dense):
        if len(configs) > 1:
            raise ValueError(
                f"sources must be one MoE model, or dense ones ({', '.join(MOE_FAMILY)})"
            )
        if growth.granularity > 1:
            raise ValueError("--granularity cuts dense feed-forwards, not experts: leave it out")
        if growth.routing != "normalised":
            raise ValueError("--routing is of the router that a dense model gets: leave it out")
        reading = read_config(args.sources[0], multi_token=False)
        imported = stack.enter_context(import_folder(args.sources[0], config=reading))
        return grow(reading, imported.tensors, growth, _expert_loads(args)), [imported]
    _require_compatible(args.sources, configs)
    sizes = growth.experts, growth.top_k, growth.granularity
    renormalise = growth.routing == "normalised"
    readings = [read_dense(config, *sizes, renormalise) for config in configs]
    sources = [
        stack.enter_context(import_folder(folder, config=plain))
        for folder, (plain, _) in zip(args.sources, readings, strict=True)
    ]
    return upcycle(readings[0][1], [source.tensors for source in sources], growth), sources


def _require_compatible(folders: list[Path], configs: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if dense models differ in more than names, versions and dtypes."""
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"}
    for i, j in combinations(range(len(folders)), 2):
        named = {*configs[i], *configs[j]} - ignored
        names = sorted(name for name in named if not is_mark(name))
        differ = [n for n in names if configs[i].get(n) != configs[j].get(n)]
        if differ:
            pairs = [(name, configs[i].get(name), configs[j].get(name)) for name in differ[:5]]
            values = ", ".join(f"{name} is {one!r} and {other!r}" for name, one, other in pairs)
            raise ValueError(
                f"{folders[i]} and {folders[j]} cannot be merged: {values}; merge models "
                "that were trained from the same one"
            )


def _expert_loads(args: argparse.Namespace) -> Mapping[int, list[float]] | None:
    """Return each expert's load on the text of ``--text``, by layer; None without a text."""
    if args.text is None:
        return None
    from moefold.api import load_model
    from moefold.training.hooks.experts import record_routing

    tokenizer = from_path(str(args.sources[0]))
    with path_in_errors(args.text):
        text = args.text.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{args.text} has no tokens to measure expert loads on")
    pieces = [ids[at : at + PIECE] for at in range(0, len(ids), PIECE)]
    model = load_model(args.sources[0])
    return {int(layer.name): layer.load_E.tolist() for layer in record_routing(model, pieces)}
