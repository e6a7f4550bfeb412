"""Tables of tensor names: our parameters and the tensors of a Hugging Face folder.

A parameter of ours is one tensor on disk, or several pieces: gate and up separate, or a tensor per
expert. An entry names the pieces; ``{i}`` stands for the layer, ``{e}`` for the expert. Names with
``{e}`` fill the leading dim; two names fill the next dim, gate first. Alternatively weights are
*packed* on disk: all experts in one tensor, with gate above up.

Letters: E experts, F expert width, D hidden.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights

HF_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
}
"""Fields of ``config.json`` for sizes that all families have."""
Layout = Literal["per_expert", "packed"]
Shape = tuple[int, ...]

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, or one per layer, and its names on disk."""

    ours: str
    theirs: tuple[str, ...]
    packed: tuple[str, ...] = ()
    """Names in the packed layout; empty if both layouts are equal."""
    also: tuple[str, ...] = ()
    """Names in some folders in place of ``theirs``; read but never written."""
    fused: bool = False
    """Whether gate is above up in one tensor in both layouts."""
    ones: tuple[int, int] = (0, 0)
    """Numbers of dims of size 1 before and after our dims on disk."""
    order: tuple[int, ...] = ()
    """Permutation of our dims on disk; that of gate and up is merged with a neighbouring dim."""
    joined: tuple[str, ...] = ()
    """Parameters whose rows are concatenated in one tensor, in order, including this one; only in
    the packed layout if that has a name."""
    grouped: bool = False
    """Whether rows are concatenated within each unit that tp divides, such as a head."""
    rows: "JoinedRows | None" = None
    """Rows of the joined tensor that belong to this parameter; set by :func:`sized`."""


@dataclass(frozen=True)
class JoinedRows:
    """Rows of a parameter in a tensor on disk that several parameters share."""

    groups: int
    start: int
    """First row within a group."""
    length: int
    total: int
    """Rows of a group, of all parameters."""

    def places(self, first: int = 0, end: int | None = None) -> list[int]:
        """Return the rows on disk of our rows ``first`` to ``end``."""
        every = range(first, self.groups * self.length if end is None else end)
        return [n // self.length * self.total + self.start + n % self.length for n in every]


def sized(table: Iterable[Entry], decoder: Decoder) -> tuple[Entry, ...]:
    """Return a table with ``rows`` of joined tensors set by the sizes of a decoder."""
    known = {_LAYER.sub("layers.{i}.", weight.name): weight for weight in known_weights(decoder)}
    found: list[Entry] = []
    for row in table:
        if row.joined and row.ours in known:
            groups = known[row.ours].cuts[0][1].number if row.grouped else 1
            sizes = [known[name].shape[0] // groups for name in row.joined]
            place = row.joined.index(row.ours)
            rows = JoinedRows(groups, sum(sizes[:place]), sizes[place], sum(sizes))
            row = replace(row, rows=rows)
        found.append(row)
    return tuple(found)


@dataclass(frozen=True)
class TensorPiece:
    """One tensor on disk, which is ``ours[index]`` of a parameter after a reshape."""

    name: str
    shape: Shape
    index: tuple[int, ...]
    order: tuple[int, ...] = ()
    rows: JoinedRows | None = None

    def to_ours(self, stored: Any, shape: Shape) -> Any:
        """Return a stored tensor as our part, of ``shape``; a view if possible."""
        if self.rows is not None:
            return stored[self.rows.places()].reshape(shape)
        if not self.order:
            return stored.reshape(shape)
        back = sorted(range(len(self.order)), key=lambda at: self.order[at])
        return stored.reshape([shape[dim] for dim in self.order]).permute(back)

    def to_theirs(self, part: Any, joined: Any = None) -> Any:
        """Return our part as it is stored; a joined tensor is filled in ``joined``, if given."""
        if self.rows is not None:
            joined = part.new_zeros(self.shape) if joined is None else joined
            joined[self.rows.places()] = part.reshape(-1, *self.shape[1:])
            return joined
        return (part.permute(self.order) if self.order else part).reshape(self.shape)


def entry(ours: str, *theirs: str, packed: str | tuple[str, ...] = ()) -> Entry:
    """Return one entry of a table."""
    return Entry(ours, theirs, (packed,) if isinstance(packed, str) else packed)


def joined(theirs: str, *ours: str, grouped: bool = False) -> tuple[Entry, ...]:
    """Return entries for parameters of attention that are concatenated in one tensor."""
    names = tuple(f"layers.{{i}}.attention.{one}" for one in ours)
    at = f"model.layers.{{i}}.{theirs}"
    return tuple(Entry(one, (at,), joined=names, grouped=grouped) for one in names)


def find(table: Iterable[Entry], ours: Iterable[str]) -> dict[str, tuple[Entry, int]]:
    """Return the entry and layer number (0 outside layers) of each parameter.

    Raises:
        ValueError: listing the parameters that are not in the table.
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
        raise ValueError(f"the family has no Hugging Face name for: {', '.join(sorted(unnamed))}")
    return found


def pieces(row: Entry, layer: int, shape: Shape, layout: Layout) -> tuple[TensorPiece, ...]:
    """Return the tensors on disk that make up one parameter of ``shape`` in a layout."""
    names = row.packed if layout == "packed" and row.packed else row.theirs
    if row.rows is not None and (names is row.packed or not row.packed):
        there = (row.rows.groups * row.rows.total, *shape[1:])
        return (TensorPiece(names[0].format(i=layer), there, (), rows=row.rows),)
    if row.fused or any(row.ones):
        before, after = row.ones
        there = _merged(shape) if row.fused else (*(1,) * before, *shape, *(1,) * after)
        return (TensorPiece(names[0].format(i=layer), there, ()),)
    if row.order:
        there = [shape[dim] for dim in row.order]
        if (halves := row.order.index(1)) and len(shape) > 2 and shape[1] == 2:
            at = halves - 1 if row.order[halves - 1] == 2 else halves
            there[at : at + 2] = [there[at] * there[at + 1]]
        return (TensorPiece(names[0].format(i=layer), tuple(there), (), row.order),)
    if len(names) < len(row.theirs) or ("{e}" in row.theirs[0] and "{e}" not in names[0]):
        merged = _merged(shape) if len(shape) == 4 else shape
        return (TensorPiece(names[0].format(i=layer), merged, ()),)
    stacked = len(names) > 1
    experts = range(shape[0]) if "{e}" in names[0] else (None,)
    made: list[TensorPiece] = []
    for expert in experts:
        for part, name in enumerate(names):
            index = (() if expert is None else (expert,)) + ((part,) if stacked else ())
            made.append(TensorPiece(name.format(i=layer, e=expert), shape[len(index) :], index))
    return tuple(made)


def _merged(shape: Shape) -> Shape:
    """Return ``[E, 2 * F, D]`` for ``[E, 2, F, D]``, also without E; matrices are unchanged."""
    if len(shape) < 3:
        return shape
    return (*shape[:-3], shape[-3] * shape[-2], shape[-1])


def choose_layout(row: Entry, layer: int, present: Mapping[str, object]) -> tuple[Entry, Layout]:
    """Return the entry and layout by which a parameter is found among the tensors on disk."""
    if row.also and row.also[0].format(i=layer) in present:
        return replace(row, theirs=row.also), "per_expert"
    packed = row.packed and row.packed[0].format(i=layer) in present
    return row, "packed" if packed else "per_expert"


def gqa_sizes(
    experts: str, width: str, top_k: str = "num_experts_per_tok", **more: str
) -> dict[str, str]:
    """Return the size fields of ``config.json`` of a family with grouped-query attention.

    The arguments are its fields for the experts' sizes; ``more``: further sizes by field.
    """
    routed = {top_k: "top_k", experts: "experts", width: "expert_width"}
    return HF_SIZES | {"num_key_value_heads": "kv_heads"} | routed | more


def llama_names(
    before: str = "input_layernorm",
    after: str = "",
    second_before: str = "post_attention_layernorm",
    second_after: str = "",
    mlp: str = "mlp",
) -> tuple[Entry, ...]:
    """Return entries of embedding, head, norms, and a dense feed-forward called ``mlp``.

    The other arguments name the norms around both halves of a block; empty: no such norm.
    """
    at = "model.layers.{i}"
    norms = {"attention_norm": before, "attention_out_norm": after}
    norms |= {"ffn_norm": second_before, "ffn_out_norm": second_after}
    there = [(ours, theirs) for ours, theirs in norms.items() if theirs]
    return (
        entry("embed.weight", "model.embed_tokens.weight"),
        entry("norm.weight", "model.norm.weight"),
        entry("head.weight", "lm_head.weight"),
        *(entry(f"layers.{{i}}.{ours}.weight", f"{at}.{name}.weight") for ours, name in there),
        entry("layers.{i}.ffn.w_in", f"{at}.{mlp}.gate_proj.weight", f"{at}.{mlp}.up_proj.weight"),
        entry("layers.{i}.ffn.w_out", f"{at}.{mlp}.down_proj.weight"),
    )


def gqa_names(*, qk_norm: bool = False) -> tuple[Entry, ...]:
    """Return entries of grouped-query attention, with or without norms of queries and keys."""
    parts = {p: f"{p}_proj" for p in "qkvo"}
    return attention_names(parts | ({n: n for n in ("q_norm", "k_norm")} if qk_norm else {}))


def attention_names(parts: Mapping[str, str], ending: str = "weight") -> tuple[Entry, ...]:
    """Return entries of attention, from our names of its parts to theirs."""
    ended = {f"{ours}.{ending}": f"{theirs}.{ending}" for ours, theirs in parts.items()}
    return layer_names(ended, "attention.", "self_attn.")


def layer_names(parts: Mapping[str, str], ours: str = "", theirs: str = "") -> tuple[Entry, ...]:
    """Return entries of each layer from our names to theirs, with prefixes ``ours``, ``theirs``."""
    at = f"layers.{{i}}.{ours}", f"model.layers.{{i}}.{theirs}"
    return tuple(entry(at[0] + one, at[1] + other) for one, other in parts.items())


def projection_bias_names(parts: str = "qkv") -> tuple[Entry, ...]:
    """Return entries of the biases of attention's projections."""
    return attention_names({p: f"{p}_proj" for p in parts}, "bias")


def latent_names() -> tuple[Entry, ...]:
    """Return entries of latent attention."""
    parts = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    parts |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    return attention_names({"q": "q_proj", **parts, "o": "o_proj"})


def expert_names(
    gate: str = "gate.weight",
    packed: str = "gate.weight",
    apart: str = "mlp",
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Entry, ...]:
    """Return entries of router (``gate``) and experts, as most families name them.

    Unpacked experts are in module ``apart``, with a matrix for each of ``parts``.
    """
    at, together, ours = f"model.layers.{{i}}.{apart}", "model.layers.{i}.mlp", "layers.{i}.moe"
    *both, last = (f"{at}.experts.{{e}}.{part}.weight" for part in parts)
    return (
        entry(f"{ours}.router.weight", f"{at}.{gate}", packed=f"{together}.{packed}"),
        entry(f"{ours}.experts.w_in", *both, packed=f"{together}.experts.gate_up_proj"),
        entry(f"{ours}.experts.w_out", last, packed=f"{together}.experts.down_proj"),
    )


def qwen_delta_names() -> tuple[Entry, ...]:
    """Return entries of attention, its gate in q_proj, and of delta nets but input projections."""
    parts = {"a_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm.weight"}
    return (
        *joined("self_attn.q_proj.weight", "q.weight", "out_gate.weight", grouped=True),
        *attention_names({p: f"{p}_proj" for p in "kvo"} | {n: n for n in ("q_norm", "k_norm")}),
        *joined("linear_attn.conv1d.weight", "q_taps", "k_taps", "v_taps"),
        *layer_names(parts | {"out.weight": "out_proj.weight"}, "attention.", "linear_attn."),
    )


def channel_delta_names(gates: Mapping[str, str], ones: tuple[int, int]) -> tuple[Entry, ...]:
    """Return entries of delta nets with decays per channel; ``gates`` names decay and gate."""
    taps = tuple(f"layers.{{i}}.attention.{part}_taps" for part in "qkv")
    at = "model.layers.{i}.self_attn"
    joined_at = (f"{at}.conv1d.weight",)
    parts = {f"{part}_in": f"{part}_proj" for part in "qkv"} | {"beta_in": "b_proj", **gates}
    return (
        *attention_names(parts | {"norm": "o_norm", "out": "o_proj"}),
        *(
            Entry(ours, (f"{at}.{part}_conv1d.weight",), joined_at, joined=taps)
            for ours, part in zip(taps, "qkv", strict=True)
        ),
        Entry("layers.{i}.attention.a_log", (f"{at}.forget_gate.A_log",), ones=ones),
        entry("layers.{i}.attention.dt_bias", f"{at}.forget_gate.dt_bias"),
    )


def respelled(
    table: Iterable[Entry], spellings: Mapping[str, str], also: Mapping[str, str] | None = None
) -> tuple[Entry, ...]:
    """Return a table with parts of names replaced; the names given remain the packed ones.

    Names with the replacements ``also``, as in some folders, are read too.
    """

    def spelled(names: tuple[str, ...], parts: Mapping[str, str]) -> tuple[str, ...]:
        for theirs, others in parts.items():
            names = tuple(name.replace(theirs, others) for name in names)
        return names

    found: list[Entry] = []
    for row in table:
        theirs, more = (spelled(row.theirs, parts) for parts in (spellings, also or {}))
        packed = row.packed or (row.theirs if theirs != row.theirs else ())
        more = more if more not in (row.theirs, theirs) else ()
        found.append(replace(row, theirs=theirs, packed=packed, also=more))
    return tuple(found)


def qwen_names() -> tuple[Entry, ...]:
    """Return entries of a Qwen with a gated shared expert, without attention."""
    gate = "model.layers.{i}.mlp.shared_expert_gate.weight"
    shared = (*shared_names("shared_expert"), entry("layers.{i}.moe.shared.gate.weight", gate))
    return (*llama_names(), *expert_names(), *shared)


def deepseek_names() -> tuple[Entry, ...]:
    """Return entries of a DeepSeek-V3, without attention."""
    return (*llama_names(), *expert_names(), *bias_names(), *shared_names())


def w123_names() -> tuple[Entry, ...]:
    """Return entries of router and experts as in Mixtral."""
    return expert_names(apart="block_sparse_moe", parts=("w1", "w3", "w2"))


def bias_names(
    apart: str = "mlp.gate.e_score_correction_bias",
    packed: str | None = None,
    ones: tuple[int, int] = (0, 0),
) -> tuple[Entry, ...]:
    """Return the entry of the selection bias in both layouts."""
    at, ours = "model.layers.{i}", "layers.{i}.moe.router.selection_bias"
    return (Entry(ours, (f"{at}.{apart}",), (f"{at}.{packed or apart}",), ones=ones),)


def shared_names(apart: str = "shared_experts", packed: str | None = None) -> tuple[Entry, ...]:
    """Return entries of the shared expert; both layouts have separate gate and up."""
    at, ours = "model.layers.{i}.mlp", "layers.{i}.moe.shared"

    def names(of: str, *parts: str) -> tuple[str, ...]:
        return tuple(f"{at}.{of}.{part}_proj.weight" for part in parts)

    return tuple(
        entry(f"{ours}.{name}", *names(apart, *parts), packed=names(packed or apart, *parts))
        for name, parts in (("w_in", ("gate", "up")), ("w_out", ("down",)))
    )
