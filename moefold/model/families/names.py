"""Tensor names: ours beside those of a Hugging Face folder, as data.

A parameter of ours is stored on disk whole, or as pieces: gate and up apart, or each expert in a
tensor of its own. An entry names the pieces; ``{i}`` stands for the layer, ``{e}`` for the expert.
Names with ``{e}`` fill the leading dim; two names fill the next dim, gate first. The same weights
may lie *packed* on disk instead: all experts in one tensor, gate above up.

Letters: E experts, F expert width, D hidden.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Layout = Literal["per_expert", "packed"]
Shape = tuple[int, ...]

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, or one per layer, and the names it has on disk."""

    ours: str
    theirs: tuple[str, ...]
    packed: str | None = None
    """The name in the packed layout; None where both layouts store it alike."""


@dataclass(frozen=True)
class TensorPiece:
    """One tensor on disk and the part of ours that it is: ``ours[index]``, after a reshape."""

    name: str
    shape: Shape
    index: tuple[int, ...]


def entry(ours: str, *theirs: str, packed: str | None = None) -> Entry:
    """Write one row of a table of names."""
    return Entry(ours, theirs, packed)


def find(table: Iterable[Entry], ours: Iterable[str]) -> dict[str, tuple[Entry, int]]:
    """Return each parameter's entry and layer number (0 for those outside the layers).

    Raises:
        ValueError: listing every parameter that the table does not name.
    """
    rows = {row.ours: row for row in table}
    found: dict[str, tuple[Entry, int]] = {}
    unnamed: list[str] = []
    for name in ours:
        match = _LAYER.match(name)
        row = rows.get(_LAYER.sub("layers.{i}.", name))
        if row is None:
            unnamed.append(name)
        else:
            found[name] = (row, int(match[1]) if match else 0)
    if unnamed:
        raise ValueError(f"the family has no name on disk for: {', '.join(sorted(unnamed))}")
    return found


def pieces(row: Entry, layer: int, shape: Shape, layout: Layout) -> tuple[TensorPiece, ...]:
    """Return the tensors on disk that one parameter of ``shape`` consists of in a layout."""
    if layout == "packed" and row.packed is not None:
        return (TensorPiece(row.packed.format(i=layer), _merged(shape), ()),)
    stacked = len(row.theirs) > 1
    experts = range(shape[0]) if "{e}" in row.theirs[0] else (None,)
    made: list[TensorPiece] = []
    for expert in experts:
        for part, name in enumerate(row.theirs):
            index = (() if expert is None else (expert,)) + ((part,) if stacked else ())
            made.append(TensorPiece(name.format(i=layer, e=expert), shape[len(index) :], index))
    return tuple(made)


def _merged(shape: Shape) -> Shape:
    """``[E, 2, F, D]`` is stored as ``[E, 2 * F, D]``; other shapes stay."""
    return (shape[0], shape[1] * shape[2], shape[3]) if len(shape) == 4 else shape


def choose_layout(row: Entry, layer: int, present: Mapping[str, object]) -> Layout:
    """Return the layout in which a parameter lies among the tensors on disk."""
    if row.packed is not None and row.packed.format(i=layer) in present:
        return "packed"
    return "per_expert"


def llama_names() -> tuple[Entry, ...]:
    """Names outside attention and feed-forward, and those of a dense feed-forward."""
    at = "model.layers.{i}"
    return (
        entry("embed.weight", "model.embed_tokens.weight"),
        entry("norm.weight", "model.norm.weight"),
        entry("head.weight", "lm_head.weight"),
        entry("layers.{i}.attention_norm.weight", f"{at}.input_layernorm.weight"),
        entry("layers.{i}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight"),
        entry("layers.{i}.ffn.w_in", f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
        entry("layers.{i}.ffn.w_out", f"{at}.mlp.down_proj.weight"),
    )


def gqa_names(*, qk_norm: bool) -> tuple[Entry, ...]:
    """Names of grouped-query attention, with or without norms on queries and keys."""
    parts = [(p, f"{p}_proj") for p in "qkvo"]
    if qk_norm:
        parts += [("q_norm", "q_norm"), ("k_norm", "k_norm")]
    at = "model.layers.{i}.self_attn"
    return tuple(
        entry(f"layers.{{i}}.attention.{ours}.weight", f"{at}.{theirs}.weight")
        for ours, theirs in parts
    )


def expert_names() -> tuple[Entry, ...]:
    """Names of router and experts that most families share."""
    at, one = "model.layers.{i}.mlp", "model.layers.{i}.mlp.experts.{e}"
    return (
        entry("layers.{i}.moe.router.weight", f"{at}.gate.weight"),
        entry(
            "layers.{i}.moe.experts.w_in",
            f"{one}.gate_proj.weight",
            f"{one}.up_proj.weight",
            packed=f"{at}.experts.gate_up_proj",
        ),
        entry(
            "layers.{i}.moe.experts.w_out",
            f"{one}.down_proj.weight",
            packed=f"{at}.experts.down_proj",
        ),
    )
