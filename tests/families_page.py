"""The tables of ``docs/families.md``: which parts each family uses, read off models drawn of it.

A part is a kind of layer, or a field of a layer's, block's or decoder's record that is not at its
default. A field without an entry in ``WORDS`` is named as in the record.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from moefold.config.base import Record
from moefold.model.config import Decoder
from moefold.model.families.registry import MISSING_PARTS, families, from_hf
from moefold.moe.config import Moe
from tests.family_draws import draw

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = "| model_type | attention | router | feed-forward |"
DRAWS = 8
"""Models drawn of each family."""
NUMBERS = frozenset(("theta", "yarn", "bands", "epsilon", "latent_epsilon", "context", "tied"))
NUMBERS |= frozenset(("norm_epsilon", "init_std", "family", "balance"))
"""Fields that any family may have, of which the page says nothing here."""
UNSAID = "unsaid"
"""In place of a value that says nothing: a factor of 1, a field of a record that is not there."""
ABSENT: dict[str, Any] = {"sinks": False}
"""Values of fields by which a part is absent, where that is not the default."""
WORDS: dict[Any, str] = {
    "gqa": "grouped-query",
    "windowed": "grouped-query",
    "chunked": "grouped-query",
    "mla": "latent",
    "delta_net": "delta nets",
    "convolution": "short convolutions",
    "activation": "activation of their own",
    "activation.limit": "clamped",
    "bias": "biases",
    "chunk": "chunks",
    "decay_floor": "least decay",
    "embed_scale": "factor on the embedding",
    "expert_bias": "their biases",
    "floor": "least sum",
    "fraction": "partial rotary",
    "gate": "gate on the output",
    "groups": "groups",
    "logits_divisor": "divisor of the logits",
    "norm_after_rope": "norm after rotary",
    "order": "over the chosen",
    "q_rank": "latent queries",
    "residual_scale": "factor on the residual",
    "selection_bias": "selection bias",
    "shared": "shared expert",
    "shared.gate": "its gate",
    "v_dim": "values of other dims",
    "value_scale": "factor on values",
    "window": "windows",
    "gqa.scale": "factor on scores",
    "mla.gate": "gate of each head",
    "moe.scale": "factor on their sum",
    "topk.bias": "bias",
    "topk.scale": "scale",
    "delta_net.gate": "sigmoid gate",
    ("decay", "channel"): "decays of each channel",
    ("groups.score", "max"): "by their best expert",
    ("layout", "half"): "half rotary",
    ("layout", "interleaved"): "interleaved",
    ("norm", "layer"): "LayerNorm",
    ("norm", "rms"): "RMSNorm",
    ("norm", "zero_centred"): "norms centred at zero",
    ("norms", "after"): "norms after each sublayer",
    ("norms", "both"): "norms before and after each sublayer",
    ("norms", "shared"): "one norm for both sublayers",
    ("qk_norm", "head"): "q/k norm per head",
    ("qk_norm", "projection"): "q/k norm per projection",
    ("qk_norm", "unit"): "q/k norm without a weight",
    ("qk_norm", "zero_centred"): "q/k norm per head, centred at zero",
    ("renormalise", False): "not renormalised",
    ("renormalise", True): "renormalised",
    ("rope", None): "no positions",
    ("weigh", "input"): "weights on their input",
}
"""What the page calls kinds of layers, fields, and values of fields."""


@cache
def decoders(model_type: str) -> tuple[Decoder, ...]:
    """Draw models of a family."""
    seeds = [Random(f"page {model_type} {seed}") for seed in range(DRAWS)]
    configs = [draw(model_type, seed) | {"model_type": model_type} for seed in seeds]
    return tuple(from_hf(config).decoder for config in configs)


def options(record: Record, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of each field that is an option; sizes are none.

    A number or a record is an option by being there, if its default is its absence; of a factor, 1
    says nothing. The fields of a record that is there by default are options of the outer one.
    """
    for field, info in type(record).model_fields.items():
        value = getattr(record, field)
        default = ABSENT.get(field, info.default)
        name = prefix + field
        if info.is_required() or field in NUMBERS or field == "kind" or isinstance(value, tuple):
            continue
        if isinstance(default, Record):
            yield name, value and default, default
            if isinstance(value, Record):
                yield from options(value)
            else:
                yield from ((inner, UNSAID, usual) for inner, _, usual in options(default))
        elif default is None:
            yield name, value if isinstance(value, str) else value is not None, False
            if isinstance(value, Record):
                yield from options(value, f"{name}.")
        elif isinstance(value, bool | str):
            yield name, value, default
        elif isinstance(value, float) and not prefix:
            yield name, value != default or UNSAID, False


def words(name: str, value: Any, kind: str) -> str:
    """Return what the page calls a value of a field of a kind of layer."""
    known = (f"{kind}.{name}", (name, value), name)
    plain = name.replace("_", " ").replace(".", " ")
    said = f"{plain} {value}" if isinstance(value, str) else plain
    return next((WORDS[key] for key in known if key in WORDS), said)


def parts(drawn: Iterable[Iterable[Record]]) -> Iterator[str]:
    """Yield the options that drawn models set, each of which has some records.

    Records that lack a field, as grouped-query attention lacks a window, have its default.
    """
    models = [[(_kind(r), {name: rest for name, *rest in options(r)}) for r in m] for m in drawn]
    records = [record for model in models for record in model]
    for kind in dict.fromkeys(kind for kind, _ in records):
        of_kind = [[found for own, found in model if own == kind] for model in models]
        known = {
            name: rest[1] for own, found in records if own == kind for name, rest in found.items()
        }
        for name, default in known.items():
            lacking = UNSAID if "." in name else default
            values = [{found.get(name, [lacking])[0] for found in model} for model in of_kind]
            said = _said(kind, name, default, [found - {UNSAID} for found in values])
            yield from [said] if said else []


def _kind(record: Record) -> str:
    kind = getattr(record, "kind", "")
    return next((name for name, said in WORDS.items() if said == WORDS.get(kind)), kind)


def _said(kind: str, name: str, default: Any, values: list[set[Any]]) -> str:
    """Return what the page says of a field with these values in each of several models."""
    others = sorted(set().union(*values) - {default}, key=str)
    said = [words(name, value, kind) for value in others]
    if not said:
        return ""
    if any(default in found and len(found) > 1 for found in values):
        return " or ".join(said) + " in some layers"
    if {default} not in values:
        return " or ".join(said)
    usual = WORDS.get((name, default))
    return " or ".join([usual, *said] if usual else [*said, "none"])


def row(model_type: str) -> str:
    """Return what the page says of a family, without its name."""
    drawn = decoders(model_type)
    blocks = [[*decoder.blocks] for decoder in drawn]
    layers = [[block.attention for block in model] for model in blocks]
    ffns = [[block.ffn for block in model] for model in blocks]
    mixtures = [[ffn for ffn in model if isinstance(ffn, Moe)] for model in ffns]
    routers = [[ffn.router for ffn in model] for model in mixtures]
    kinds = dict.fromkeys(str(getattr(a, "kind", "")) for model in layers for a in model)
    attention = [*(WORDS.get(kind, kind) for kind in sorted(kinds)), *parts(layers)]
    scores = sorted({str(router.score) for model in routers for router in model})
    routing = [part for part in parts(routers) if not part.startswith("score")]
    dense = [len(found) < len(model) for found, model in zip(mixtures, ffns, strict=True)]
    ffn = ["routed experts", *parts(mixtures), *parts(blocks), *parts([d] for d in drawn)]
    ffn += ["some layers dense"] if any(dense) else []
    cells = attention, [" or ".join(scores), *routing], ffn
    return " | ".join(", ".join(dict.fromkeys(cell)) for cell in cells)


def table() -> str:
    """Return the rows of both tables, as the page has them."""
    rows = [
        f"| {' '.join((name, *family.aliases))} | {row(name)} |"
        for name, family in sorted(families().items())
        if family.__module__.startswith("moefold.")
    ]
    missing = [f"| {name} | {part} |" for name, part in sorted(MISSING_PARTS.items())]
    lines = [HEAD, "|---|---|---|---|", *rows, "", "| model_type | missing part |", "|---|---|"]
    return "\n".join([*lines, *missing])


def write() -> None:
    """Write both tables into the page anew; they are its end."""
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(HEAD)] + table() + "\n", "utf-8")
