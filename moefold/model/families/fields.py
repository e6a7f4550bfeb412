"""Descriptors of fields of ``config.json``: each reads and writes one or several fields.

A family lists its descriptors, which return values by their paths in its record, such as
``shape.heads``. Fields that no descriptor reads and no list of harmless fields names are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from moefold.model.families.hub import REQUIRED, SPECIAL, ConfigReader, read_rope, rope_fields
from moefold.moe.config import Aux, Bias, Groups

Values = dict[str, Any]
BIAS_RATE = 1e-3
"""Update rate of the selection bias in DeepSeek-V3's report; no ``config.json`` states one."""
AUX_COEFFICIENT = 1e-3
"""Default coefficient of the aux loss in most classes of transformers."""


class ConfigField:
    """Base of descriptors of one or several fields of ``config.json``."""

    def read(self, config: ConfigReader) -> Values:
        """Read the fields; return values of the family's record by path."""
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields that describe a family's record."""
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse fields that contradict the record read from ``config``."""


def _identity(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class FieldValue(ConfigField):
    """A field with one value of the record, optionally converted."""

    name: str
    path: str
    kind: type
    default: Any = REQUIRED
    """Value of the field if it is absent or null."""
    from_hf: Callable[[Any], Any] = _identity
    """Converts the field's value to the record's; ``to_hf`` is the inverse."""
    to_hf: Callable[[Any], Any] = _identity

    def read(self, config: ConfigReader) -> Values:
        return {self.path: self.from_hf(config.get(self.name, self.kind, self.default))}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {self.name: self.to_hf(attrgetter(self.path)(model))}


@dataclass(frozen=True)
class Fixed(ConfigField):
    """A field that, if present, must equal ``value`` or an equivalent in ``alternatives``."""

    name: str
    value: Any
    alternatives: tuple[Any, ...] = ()

    def read(self, config: ConfigReader) -> Values:
        """Refuse any other value."""
        config.require_one_of(self.name, self.value, *self.alternatives)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {self.name: self.value}


def fixed(**values: Any) -> tuple[Fixed, ...]:
    """Return descriptors of fields that must have the given values if present."""
    return tuple(Fixed(name, value) for name, value in values.items())


@dataclass(frozen=True)
class Ignored(ConfigField):
    """Fields that have no effect in this family."""

    names: tuple[str, ...]
    written: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: ConfigReader) -> Values:
        config.ignore(*self.names)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        return self.written


NULL_TOKENS = Ignored(SPECIAL, dict.fromkeys(SPECIAL))
"""Writes null for special tokens that a folder lacks; otherwise the class's defaults apply."""


MULTI_TOKEN = Ignored(
    ("num_nextn_predict_layers", "num_mtp_layers"), {"num_nextn_predict_layers": 0}
)
"""Number of multi-token prediction blocks, in families that leave them out."""


@dataclass(frozen=True)
class Derived(ConfigField):
    """A redundant field, computed from the record; refused if it contradicts the others."""

    name: str
    derive: Callable[[Any], Any]

    def read(self, config: ConfigReader) -> Values:
        """Return nothing; ``check`` verifies the field."""
        config.ignore(self.name)
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Compare the field with the derived value."""
        config.require_one_of(self.name, self.derive(model), None)

    def write(self, model: Any) -> Mapping[str, Any]:
        return {self.name: self.derive(model)}


def sparse_layers(model: Any) -> list[bool]:
    """Return whether each layer has experts, in a model with listed dense layers."""
    return [layer not in model.shape.dense for layer in range(model.shape.layers)]


class KvHeads(ConfigField):
    """Number of key-value heads, which equals that of heads if the field is null."""

    def read(self, config: ConfigReader) -> Values:
        """Return the number of heads if the field is null; otherwise ``hf_sizes`` reads it."""
        if not config.is_null("num_key_value_heads"):
            return {}
        return {"shape.kv_heads": config.get("num_attention_heads", int)}


@dataclass(frozen=True)
class HeadDim(ConfigField):
    """Dims per head; by default ``hidden / heads``, or the default of the transformers class."""

    default: int | None = None

    def read(self, config: ConfigReader) -> Values:
        head_dim = config.get("head_dim", int, self.default)
        return {} if head_dim is None else {"shape.head_dim": head_dim}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {"head_dim": model.shape.resolved_head_dim}


@dataclass(frozen=True)
class Rotary(ConfigField):
    """Rotary positions and the longest sequence."""

    theta: float
    """Default of ``rope_theta``."""
    layout: str = "half"
    layout_field: str | None = None
    """Field that selects the layout, ``interleaved`` if true, else ``half``."""
    scales_softmax: bool = False
    """Whether ``mscale_all_dim`` also scales the softmax."""
    fraction: float | None = None
    """Default fraction of a head's dims that are rotated; None: the family rotates all."""
    default_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Default of ``rope_parameters`` if ``rope_scaling`` is absent too."""

    def read(self, config: ConfigReader) -> Values:
        """Read theta, scaling, fraction and layout."""
        softmax = self.scales_softmax
        fraction = self.fraction
        parameters = self.default_parameters
        rope = read_rope(
            config, self.theta, scales_softmax=softmax, fraction=fraction, parameters=parameters
        )
        layout = self.layout
        if self.layout_field is not None:
            interleaved = config.get(self.layout_field, bool, layout == "interleaved")
            layout = "interleaved" if interleaved else "half"
        return {"rope": rope.model_copy(update={"layout": layout})}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields; layout and fraction only if the family has fields for them."""
        rope = model.rope
        written = rope_fields(model.rope, model.context)
        if self.layout_field is not None:
            written[self.layout_field] = rope.layout == "interleaved"
        if self.default_parameters and rope.yarn is None and rope.bands is None:
            plain = {"rope_type": "default", "rope_theta": rope.theta}
            written |= {"rope_parameters": plain, "rope_scaling": plain}
        return written | ({} if self.fraction is None else {"partial_rotary_factor": rope.fraction})


def head_fields(
    dim: int | None = None, theta: float = 1e4, layout: str = "half", **more: Any
) -> tuple[ConfigField, ...]:
    """Return descriptors of key-value heads, dims per head and rotary positions."""
    return KvHeads(), HeadDim(dim), Rotary(theta, layout, **more)


@dataclass(frozen=True)
class AuxLossField(ConfigField):
    """``router_aux_loss_coef``; if it is absent, the documented default is used and reported.

    The number is not converted: here each layer has its own term, which is 1 for uniform routing,
    whereas transformers pools the layers, with a term of top_k for uniform routing.
    """

    default: float = AUX_COEFFICIENT
    with_bias: bool = False
    """Whether the selection bias is updated too."""

    def read(self, config: ConfigReader) -> Values:
        """Read the coefficient; 0 is no term."""
        if not config.is_set("router_aux_loss_coef"):
            config.notes.append(
                "config.json has no router_aux_loss_coef: the coefficient of the aux loss is the "
                f"documented default of {config.model_type}, {self.default}"
            )
        coefficient = config.get("router_aux_loss_coef", float, self.default)
        aux = (Aux(coefficient=coefficient),) if coefficient > 0 else ()
        bias = BiasBalance().read(config)["balance"] if self.with_bias else ()
        return {"balance": (*bias, *aux)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the coefficient of the first aux loss; 0 without one."""
        coefficients = (t.coefficient for t in model.balance if isinstance(t, Aux))
        return {"router_aux_loss_coef": next(coefficients, 0.0)}


class BiasBalance(ConfigField):
    """Update of the selection bias, at the rate of DeepSeek-V3's report; no field states it."""

    def read(self, config: ConfigReader) -> Values:
        """Return the update, and note the rate."""
        rate = BIAS_RATE
        config.notes.append(f"the update rate of the selection bias is {rate}, as in DeepSeek-V3")
        return {"balance": (Bias(rate=rate),)}


@dataclass(frozen=True)
class SequenceBalance(BiasBalance):
    """Update of the selection bias, and DeepSeek's ``aux_loss_alpha``, by default per sequence."""

    alpha: float
    with_bias: bool = True

    def read(self, config: ConfigReader) -> Values:
        """Read the coefficient; 0 is no term."""
        if not config.is_set("aux_loss_alpha"):
            config.notes.append(
                "config.json has no aux_loss_alpha: the coefficient of the aux loss is that of "
                f"the model's report, {self.alpha}"
            )
        terms = super().read(config)["balance"] if self.with_bias else ()
        coefficient = config.get("aux_loss_alpha", float, self.alpha)
        over = "sequence" if config.get("seq_aux", bool, True) else "micro_batch"
        if coefficient > 0:
            terms = (*terms, Aux(over=over, coefficient=coefficient))
        return {"balance": terms}

    def write(self, model: Any) -> Mapping[str, Any]:
        aux = next((t for t in model.balance if isinstance(t, Aux)), None)
        return {
            "aux_loss_alpha": aux.coefficient if aux else 0.0,
            "seq_aux": aux is not None and aux.over == "sequence",
        }


class GroupLimits(ConfigField):
    """``n_group`` and ``topk_group``; one group means no groups."""

    def read(self, config: ConfigReader) -> Values:
        count = config.get("n_group", int, 1)
        keep = config.get("topk_group", int, 1)
        return {"groups": Groups(count=count, keep=keep) if count > 1 else None}

    def write(self, model: Any) -> Mapping[str, Any]:
        groups = model.groups or Groups(count=1, keep=1)
        return {"n_group": groups.count, "topk_group": groups.keep}


class TopkMethod(ConfigField):
    """``topk_method``, which determines whether ``n_group`` and ``topk_group`` have an effect."""

    def read(self, config: ConfigReader) -> Values:
        config.require_one_of("topk_method", "greedy", "group_limited_greedy")
        count = config.get("n_group", int, 1)
        keep = config.get("topk_group", int, 1)
        if config.get("topk_method", str, "greedy") == "greedy":
            return {"groups": None}
        return {"groups": Groups(count=count, keep=keep, score="max")}

    def write(self, model: Any) -> Mapping[str, Any]:
        method = "group_limited_greedy" if model.groups else "greedy"
        return {**GroupLimits().write(model), "topk_method": method}


@dataclass(frozen=True)
class SharedExpertCount(ConfigField):
    """The shared expert's width as a number of routed experts."""

    name: str = "n_shared_experts"
    optional: bool = False
    """Whether there may be no shared expert."""
    width_field: str = "moe_intermediate_size"
    """Field with a routed expert's width."""

    def read(self, config: ConfigReader) -> Values:
        """Return the number times the width of one."""
        width = config.get(self.name, int) * config.get(self.width_field, int)
        return {"shape.shared_width": width or (None if self.optional else 0)}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {self.name: (model.shape.resolved_shared_width or 0) // model.shape.expert_width}


@dataclass(frozen=True)
class DenseWidthField(ConfigField):
    """Width of the dense layers."""

    name: str = "intermediate_size"
    fallback: str | None = None
    """Field that is read if ``name`` is absent."""

    def read(self, config: ConfigReader) -> Values:
        default = None if self.fallback is None else config.get(self.fallback, int)
        return {"shape.dense_width": config.get(self.name, int, default)}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse dense layers if no field states their width."""
        if model.shape.dense and not (config.is_set(self.name) or self.fallback):
            config.add_problem(f"{self.name} is missing, but the model has dense layers")

    def write(self, model: Any) -> Mapping[str, Any]:
        return {self.name: model.shape.resolved_dense_width}


def bias_field(name: str, default: bool, parts: str = "qkv") -> FieldValue:
    """Return the field for biases of projections (``parts``, as in ``Gqa.bias``)."""
    return FieldValue(name, "bias", bool, default, lambda on: parts if on else "none", _is_set)


def qk_norm_field(name: str) -> FieldValue:
    """Return the field for norms of each head of queries and keys."""
    return FieldValue(name, "qk_norm", bool, False, lambda on: "head" if on else "none", _is_set)


def _is_set(kind: str) -> bool:
    return kind != "none"


LATENT_FIELDS = (
    Derived("num_key_value_heads", lambda model: model.shape.heads),
    Derived("head_dim", lambda model: model.shape.rope_dim),
    Derived("qk_head_dim", lambda model: model.shape.nope_dim + model.shape.rope_dim),
)
ROUTER_FIELDS = (GroupLimits(), FieldValue("norm_topk_prob", "renormalise", bool, True))


def deepseek_fields(scale: float) -> tuple[ConfigField, ...]:
    """Return descriptors of router, experts and dense layers as in DeepSeek-V3.

    ``scale`` is the default factor on routing weights.
    """
    factor = FieldValue("routed_scaling_factor", "scale", float, scale)
    return (*ROUTER_FIELDS, BiasBalance(), SharedExpertCount(), DenseWidthField(), factor)
