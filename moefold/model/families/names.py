"""Mapping of the model's parameter names to the tensor names of Hugging Face folders.

A parameter is one tensor on disk or several pieces: gate and up separate, or a tensor per expert.
In the names, ``{i}`` stands for the layer, ``{e}`` for the expert. Names with ``{e}`` fill the
leading dim; two names fill the next dim, gate first. In the *packed* layout all experts are in one
tensor, with gate above up.

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
class ParamMapping:
    """A parameter, or one per layer, and the names of its tensors on disk."""

    param: str
    hf_names: tuple[str, ...]
    packed: tuple[str, ...] = ()
    """Names in the packed layout; empty if both layouts are equal."""
    alternatives: tuple[str, ...] = ()
    """Names used by some folders instead of ``hf_names``; read but never written."""
    fused: bool = False
    """Whether both layouts store gate above up in one tensor."""
    unit_dims: tuple[int, int] = (0, 0)
    """Numbers of dims of size 1 on disk before and after the parameter's dims."""
    perm: tuple[int, ...] = ()
    """Permutation of dims on disk; the dim of gate and up is merged with a neighbouring one."""
    joined: tuple[str, ...] = ()
    """Parameters whose rows are concatenated in one tensor, in order, including this one; only in
    the packed layout if that has a name."""
    grouped: bool = False
    """Whether rows are concatenated within each unit that tp divides, such as a head."""
    rows: "JoinedRows | None" = None
    """Rows of the joined tensor that belong to this parameter; set by :func:`resolve_rows`."""
    optional: bool = False
    """Whether folders may lack the tensors of all layers, which are then zeros."""


@dataclass(frozen=True)
class JoinedRows:
    """Rows of a parameter in a tensor on disk that several parameters share."""

    groups: int
    start: int
    """First mapping within a group."""
    length: int
    total: int
    """Rows of a group, of all parameters."""

    def disk_rows(self, first: int = 0, end: int | None = None) -> list[int]:
        """Return the rows on disk of the parameter's rows ``first`` to ``end``."""
        if end is None:
            end = self.groups * self.length
        numbers = []
        for row in range(first, end):
            group, place = divmod(row, self.length)
            numbers.append(group * self.total + self.start + place)
        return numbers


Table = tuple[ParamMapping, ...]
"""Mappings of a family's parameters."""


def resolve_rows(table: Table, decoder: Decoder) -> Table:
    """Return a table in which ``rows`` of joined tensors are set from the sizes of a decoder."""
    known = {_LAYER.sub("layers.{i}.", weight.name): weight for weight in known_weights(decoder)}
    resolved: list[ParamMapping] = []
    for mapping in table:
        if mapping.joined and mapping.param in known:
            groups = known[mapping.param].cuts[0][1].number if mapping.grouped else 1
            sizes = [known[name].shape[0] // groups for name in mapping.joined]
            index = mapping.joined.index(mapping.param)
            rows = JoinedRows(groups, sum(sizes[:index]), sizes[index], sum(sizes))
            mapping = replace(mapping, rows=rows)
        resolved.append(mapping)
    return tuple(resolved)


@dataclass(frozen=True)
class TensorPiece:
    """A tensor on disk, which after a reshape is ``param[index]`` of a parameter."""

    name: str
    shape: Shape
    index: tuple[int, ...]
    perm: tuple[int, ...] = ()
    rows: JoinedRows | None = None

    def from_hf(self, stored: Any, shape: Shape) -> Any:
        """Return a stored tensor as the parameter's part, of ``shape``; a view if possible."""
        if self.rows is not None:
            return stored[self.rows.disk_rows()].reshape(shape)
        if not self.perm:
            return stored.reshape(shape)
        inverse = sorted(range(len(self.perm)), key=lambda dim: self.perm[dim])
        return stored.reshape([shape[dim] for dim in self.perm]).permute(inverse)

    def to_hf(self, part: Any, joined: Any = None) -> Any:
        """Return a parameter's part as stored; a joined tensor is filled in ``joined`` if given."""
        if self.rows is not None:
            joined = part.new_zeros(self.shape) if joined is None else joined
            joined[self.rows.disk_rows()] = part.reshape(-1, *self.shape[1:])
            return joined
        return (part.permute(self.perm) if self.perm else part).reshape(self.shape)


def param(name: str, *hf_names: str, packed: str | tuple[str, ...] = ()) -> ParamMapping:
    """Return the mapping of one parameter."""
    return ParamMapping(name, hf_names, (packed,) if isinstance(packed, str) else packed)


def joined_params(hf_name: str, *params: str, grouped: bool = False) -> Table:
    """Return mappings of attention's parameters that are concatenated in one tensor."""
    joined = tuple(f"layers.{{i}}.attention.{name}" for name in params)
    stored = (f"model.layers.{{i}}.{hf_name}",)
    return tuple(ParamMapping(name, stored, joined=joined, grouped=grouped) for name in joined)


def find_mappings(table: Table, params: Iterable[str]) -> dict[str, tuple[ParamMapping, int]]:
    """Return the mapping and layer number (0 outside layers) of each parameter.

    Raises:
        ValueError: listing the parameters that are not in the table.
    """
    mappings = {mapping.param: mapping for mapping in table}
    found: dict[str, tuple[ParamMapping, int]] = {}
    unnamed: list[str] = []
    for name in params:
        match = _LAYER.match(name)
        mapping = mappings.get(_LAYER.sub("layers.{i}.", name))
        if mapping is None:
            unnamed.append(name)
        else:
            found[name] = (mapping, int(match[1]) if match else 0)
    if unnamed:
        raise ValueError(f"the family has no Hugging Face name for: {', '.join(sorted(unnamed))}")
    return found


def pieces(
    mapping: ParamMapping, layer: int, shape: Shape, layout: Layout
) -> tuple[TensorPiece, ...]:
    """Return the tensors on disk that make up one parameter of ``shape`` in a layout."""
    names = mapping.packed if layout == "packed" and mapping.packed else mapping.hf_names
    rows = mapping.rows
    perm = mapping.perm
    per_expert = "{e}" in names[0]
    if rows is not None and (names is mapping.packed or not mapping.packed):
        stored = (rows.groups * rows.total, *shape[1:])
        return (TensorPiece(names[0].format(i=layer), stored, (), rows=rows),)
    if mapping.fused or any(mapping.unit_dims):
        before, after = mapping.unit_dims
        stored = _merge_gate_up(shape) if mapping.fused else (*(1,) * before, *shape, *(1,) * after)
        return (TensorPiece(names[0].format(i=layer), stored, ()),)
    if perm:
        dims = [shape[dim] for dim in perm]
        if (gate_up := perm.index(1)) and len(shape) > 2 and shape[1] == 2:
            at = gate_up - 1 if perm[gate_up - 1] == 2 else gate_up
            dims[at : at + 2] = [dims[at] * dims[at + 1]]
        return (TensorPiece(names[0].format(i=layer), tuple(dims), (), perm),)
    if len(names) < len(mapping.hf_names) or ("{e}" in mapping.hf_names[0] and not per_expert):
        stored = _merge_gate_up(shape) if len(shape) == 4 else shape
        return (TensorPiece(names[0].format(i=layer), stored, ()),)
    stacked = len(names) > 1
    experts = range(shape[0]) if per_expert else (None,)
    found: list[TensorPiece] = []
    for expert in experts:
        for part, name in enumerate(names):
            index = (() if expert is None else (expert,)) + ((part,) if stacked else ())
            found.append(TensorPiece(name.format(i=layer, e=expert), shape[len(index) :], index))
    return tuple(found)


def _merge_gate_up(shape: Shape) -> Shape:
    """Return ``[E, 2 * F, D]`` for ``[E, 2, F, D]``, also without E; matrices are unchanged."""
    if len(shape) < 3:
        return shape
    *lead, parts, rows, columns = shape
    return (*lead, parts * rows, columns)


def detect_layout(
    mapping: ParamMapping, layer: int, present: Mapping[str, object]
) -> tuple[ParamMapping, Layout]:
    """Return the mapping and layout of a parameter in a folder with the tensors ``present``."""
    if mapping.alternatives and mapping.alternatives[0].format(i=layer) in present:
        return replace(mapping, hf_names=mapping.alternatives), "per_expert"
    packed = mapping.packed and mapping.packed[0].format(i=layer) in present
    return mapping, "packed" if packed else "per_expert"


def gqa_sizes(
    experts: str, width: str, top_k: str = "num_experts_per_tok", **more: str
) -> dict[str, str]:
    """Return the size fields of ``config.json`` of a family with grouped-query attention.

    The arguments name its fields of the experts' sizes; ``more`` maps further fields to sizes.
    """
    routed = {top_k: "top_k", experts: "experts", width: "expert_width"}
    return HF_SIZES | {"num_key_value_heads": "kv_heads"} | routed | more


def llama_names(
    before: str = "input_layernorm",
    after: str = "",
    second_before: str = "post_attention_layernorm",
    second_after: str = "",
    mlp: str = "mlp",
) -> Table:
    """Return mappings of embedding, head, norms, and a dense feed-forward called ``mlp``.

    The other arguments name the norms around both sublayers; empty: no such norm.
    """
    at = "model.layers.{i}"
    norms = {"attention_norm": before, "attention_out_norm": after}
    norms |= {"ffn_norm": second_before, "ffn_out_norm": second_after}
    present = [(name, hf_name) for name, hf_name in norms.items() if hf_name]
    return (
        param("embed.weight", "model.embed_tokens.weight"),
        param("norm.weight", "model.norm.weight"),
        param("head.weight", "lm_head.weight"),
        *(param(f"layers.{{i}}.{name}.weight", f"{at}.{hf}.weight") for name, hf in present),
        param("layers.{i}.ffn.w_in", f"{at}.{mlp}.gate_proj.weight", f"{at}.{mlp}.up_proj.weight"),
        param("layers.{i}.ffn.w_out", f"{at}.{mlp}.down_proj.weight"),
    )


def gqa_names(*, qk_norm: bool = False) -> Table:
    """Return mappings of grouped-query attention, with or without norms of queries and keys."""
    parts = {p: f"{p}_proj" for p in "qkvo"}
    return attention_names(parts | ({n: n for n in ("q_norm", "k_norm")} if qk_norm else {}))


def attention_names(parts: Mapping[str, str], ending: str = "weight") -> Table:
    """Return mappings of attention; ``parts`` has the Hugging Face names by name."""
    ended = {f"{name}.{ending}": f"{hf_name}.{ending}" for name, hf_name in parts.items()}
    return layer_names(ended, "attention.", "self_attn.")


def layer_names(parts: Mapping[str, str], prefix: str = "", hf_prefix: str = "") -> Table:
    """Return mappings of each layer; ``parts`` has Hugging Face names by name, without prefixes."""
    at = f"layers.{{i}}.{prefix}"
    hf_at = f"model.layers.{{i}}.{hf_prefix}"
    return tuple(param(at + name, hf_at + hf_name) for name, hf_name in parts.items())


def projection_bias_names(parts: str = "qkv") -> Table:
    """Return mappings of the biases of attention's projections."""
    return attention_names({p: f"{p}_proj" for p in parts}, "bias")


def latent_names() -> Table:
    """Return mappings of latent attention."""
    parts = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    parts |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    return attention_names({"q": "q_proj", **parts, "o": "o_proj"})


def expert_names(
    gate: str = "gate.weight",
    packed: str = "gate.weight",
    module: str = "mlp",
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Return mappings of router (``gate``) and experts, as most families name them.

    In the per-expert layout experts are in ``module``, with a matrix for each of ``parts``.
    """
    at = f"model.layers.{{i}}.{module}"
    packed_at = "model.layers.{i}.mlp"
    moe = "layers.{i}.moe"
    *w_in, w_out = (f"{at}.experts.{{e}}.{part}.weight" for part in parts)
    return (
        param(f"{moe}.router.weight", f"{at}.{gate}", packed=f"{packed_at}.{packed}"),
        param(f"{moe}.experts.w_in", *w_in, packed=f"{packed_at}.experts.gate_up_proj"),
        param(f"{moe}.experts.w_out", w_out, packed=f"{packed_at}.experts.down_proj"),
    )


def qwen_delta_names() -> Table:
    """Return mappings of attention with its gate in q_proj, and of delta nets without inputs."""
    parts = {"a_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm.weight"}
    return (
        *joined_params("self_attn.q_proj.weight", "q.weight", "out_gate.weight", grouped=True),
        *attention_names({p: f"{p}_proj" for p in "kvo"} | {n: n for n in ("q_norm", "k_norm")}),
        *joined_params("linear_attn.conv1d.weight", "q_taps", "k_taps", "v_taps"),
        *layer_names(parts | {"out.weight": "out_proj.weight"}, "attention.", "linear_attn."),
    )


def channel_delta_names(gates: Mapping[str, str], unit_dims: tuple[int, int]) -> Table:
    """Return mappings of delta nets with decays per channel; ``gates`` names decay and gate."""
    taps = tuple(f"layers.{{i}}.attention.{part}_taps" for part in "qkv")
    at = "model.layers.{i}.self_attn"
    packed = (f"{at}.conv1d.weight",)
    parts = {f"{part}_in": f"{part}_proj" for part in "qkv"} | {"beta_in": "b_proj", **gates}
    return (
        *attention_names(parts | {"norm": "o_norm", "out": "o_proj"}),
        *(
            ParamMapping(name, (f"{at}.{part}_conv1d.weight",), packed, joined=taps)
            for name, part in zip(taps, "qkv", strict=True)
        ),
        ParamMapping(
            "layers.{i}.attention.a_log", (f"{at}.forget_gate.A_log",), unit_dims=unit_dims
        ),
        param("layers.{i}.attention.dt_bias", f"{at}.forget_gate.dt_bias"),
    )


def renamed(
    table: Table, renames: Mapping[str, str], alternatives: Mapping[str, str] | None = None
) -> Table:
    """Return a table with parts of names replaced; the original names remain the packed ones.

    Names with the replacements ``alternatives``, as in some folders, are read too.
    """

    def rename(names: tuple[str, ...], parts: Mapping[str, str]) -> tuple[str, ...]:
        for old, new in parts.items():
            names = tuple(name.replace(old, new) for name in names)
        return names

    found: list[ParamMapping] = []
    for mapping in table:
        original = mapping.hf_names
        names, others = (rename(original, parts) for parts in (renames, alternatives or {}))
        packed = mapping.packed or (original if names != original else ())
        others = others if others not in (original, names) else ()
        found.append(replace(mapping, hf_names=names, packed=packed, alternatives=others))
    return tuple(found)


def qwen_names() -> Table:
    """Return mappings of a Qwen with a gated shared expert, without attention."""
    gate = "model.layers.{i}.mlp.shared_expert_gate.weight"
    shared = (*shared_names("shared_expert"), param("layers.{i}.moe.shared.gate.weight", gate))
    return (*llama_names(), *expert_names(), *shared)


def deepseek_names() -> Table:
    """Return mappings of a DeepSeek-V3, without attention."""
    return (*llama_names(), *expert_names(), *bias_names(), *shared_names())


def w123_names() -> Table:
    """Return mappings of router and experts as in Mixtral."""
    return expert_names(module="block_sparse_moe", parts=("w1", "w3", "w2"))


def bias_names(
    name: str = "mlp.gate.e_score_correction_bias",
    packed: str | None = None,
    unit_dims: tuple[int, int] = (0, 0),
    optional: bool = False,
) -> Table:
    """Return the mapping of the selection bias in both layouts; ``optional``: or in neither."""
    at = "model.layers.{i}"
    bias = "layers.{i}.moe.router.selection_bias"
    names = (f"{at}.{name}",)
    packed_names = (f"{at}.{packed or name}",)
    return (ParamMapping(bias, names, packed_names, unit_dims=unit_dims, optional=optional),)


def shared_names(module: str = "shared_experts", packed: str | None = None) -> Table:
    """Return mappings of the shared expert; both layouts have separate gate and up."""

    def names(module: str, *parts: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{{i}}.mlp.{module}.{part}_proj.weight" for part in parts)

    shared = "layers.{i}.moe.shared"
    return tuple(
        param(f"{shared}.{name}", *names(module, *parts), packed=names(packed or module, *parts))
        for name, parts in (("w_in", ("gate", "up")), ("w_out", ("down",)))
    )
