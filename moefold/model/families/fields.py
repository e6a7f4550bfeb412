"""Entries for fields of ``config.json``: each reads and writes one or several fields.

A family lists its entries, which return values by their paths in its record, such as
``shape.heads``. Fields that no entry reads, and no list of harmless fields names, are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from moefold.model.families.hub import REQUIRED, SPECIAL, ConfigReader, read_rope, rope_fields
from moefold.moe.config import Aux, Bias, Groups

Values = dict[str, Any]
RATE = 1e-3
"""Rate of loss-free balancing in DeepSeek-V3's report; no ``config.json`` states one."""
AUX = 1e-3
"""Default coefficient of the aux loss in most classes of transformers."""


class ConfigField:
    """Base of entries for one or several fields of ``config.json``."""

    def read(self, config: ConfigReader) -> Values:
        """Read the fields; return values of the family's record by their paths."""
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields for a family's record."""
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse fields that contradict the record read from ``config``."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class FieldValue(ConfigField):
    """A field for one value of the record, optionally converted."""

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED
    """Value of the field if it is absent or null."""
    into: Callable[[Any], Any] = _same
    """Converts the field's value to the record's; ``back`` is the inverse."""
    back: Callable[[Any], Any] = _same

    def read(self, config: ConfigReader) -> Values:
        """Read the field and convert it."""
        return {self.ours: self.into(config.take(self.theirs, self.kind, self.default))}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the field."""
        return {self.theirs: self.back(attrgetter(self.ours)(model))}


@dataclass(frozen=True)
class Only(ConfigField):
    """A field that, if present, must have one value or an equivalent one in ``also``."""

    name: str
    value: Any
    also: tuple[Any, ...] = ()

    def read(self, config: ConfigReader) -> Values:
        """Refuse any other value."""
        config.only(self.name, self.value, *self.also)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the field with ``value``."""
        return {self.name: self.value}


def only(**values: Any) -> tuple[Only, ...]:
    """Return entries for fields that must each have one value."""
    return tuple(Only(name, value) for name, value in values.items())


@dataclass(frozen=True)
class Unread(ConfigField):
    """Fields that have no effect in this family."""

    names: tuple[str, ...]
    written: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: ConfigReader) -> Values:
        """Accept any values."""
        config.skip(*self.names)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields to write."""
        return self.written


NO_TOKENS = Unread(SPECIAL, dict.fromkeys(SPECIAL))
"""Writes null for special tokens that a folder lacks, lest the class's defaults apply."""


MULTI_TOKEN = Unread(
    ("num_nextn_predict_layers", "num_mtp_layers"), {"num_nextn_predict_layers": 0}
)
"""Multi-token prediction blocks in families that leave them out."""


@dataclass(frozen=True)
class Follows(ConfigField):
    """A field that others determine, and that is refused if it contradicts them."""

    name: str
    of: Callable[[Any], Any]

    def read(self, config: ConfigReader) -> Values:
        """Leave the field to ``check``."""
        config.skip(self.name)
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Compare the field with the value that the record determines."""
        config.only(self.name, self.of(model), None)

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the determined value."""
        return {self.name: self.of(model)}


def sparse_layers(model: Any) -> list[bool]:
    """Return for each layer of a model with listed dense layers whether it has experts."""
    return [layer not in model.shape.dense for layer in range(model.shape.layers)]


class KvHeads(ConfigField):
    """Number of key-value heads if the field is null: that of heads. Otherwise it is a size."""

    def read(self, config: ConfigReader) -> Values:
        """Read the number of heads if the field is null."""
        if not config.null("num_key_value_heads"):
            return {}
        return {"shape.kv_heads": config.take("num_attention_heads", int)}


@dataclass(frozen=True)
class HeadDim(ConfigField):
    """Dims per head; by default ``hidden / heads``, or the default of transformers' class."""

    default: int | None = None

    def read(self, config: ConfigReader) -> Values:
        """Read ``head_dim`` if it is stated."""
        head_dim = config.take("head_dim", int, self.default)
        return {} if head_dim is None else {"shape.head_dim": head_dim}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return ``head_dim``."""
        return {"head_dim": model.shape.dims_per_head}


@dataclass(frozen=True)
class Rotary(ConfigField):
    """Rotary positions, and the longest sequence."""

    theta: float
    """Default of ``rope_theta``."""
    layout: str = "half"
    switch: str | None = None
    """Field that chooses between the layouts ``interleaved`` and ``half``."""
    scales_softmax: bool = False
    """Whether ``mscale_all_dim`` scales the softmax too."""
    fraction: float | None = None
    """Default fraction of a head's dims that are rotated; None is a family that rotates all."""
    unstated: Mapping[str, Any] = field(default_factory=dict)
    """Default of ``rope_parameters``, if ``rope_scaling`` is not stated either."""

    def read(self, config: ConfigReader) -> Values:
        """Read theta, scaling, fraction and layout."""
        softmax, fraction, unstated = self.scales_softmax, self.fraction, self.unstated
        rope = read_rope(
            config, self.theta, scales_softmax=softmax, fraction=fraction, unstated=unstated
        )
        layout = self.layout
        if self.switch is not None:
            interleaved = config.take(self.switch, bool, layout == "interleaved")
            layout = "interleaved" if interleaved else "half"
        return {"rope": rope.model_copy(update={"layout": layout})}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields; layout and fraction only if the family has fields for them."""
        rope, written = model.rope, rope_fields(model.rope, model.context)
        if self.switch is not None:
            written[self.switch] = rope.layout == "interleaved"
        if self.unstated and rope.yarn is None and rope.bands is None:
            plain = {"rope_type": "default", "rope_theta": rope.theta}
            written |= {"rope_parameters": plain, "rope_scaling": plain}
        return written | ({} if self.fraction is None else {"partial_rotary_factor": rope.fraction})


def heads(
    dim: int | None = None, theta: float = 1e4, layout: str = "half", **more: Any
) -> tuple[ConfigField, ...]:
    """Return entries for key-value heads, dims per head, and rotary positions."""
    return KvHeads(), HeadDim(dim), Rotary(theta, layout, **more)


@dataclass(frozen=True)
class AuxField(ConfigField):
    """``router_aux_loss_coef``; if it is absent, the documented default is used and reported.

    The number is not converted: here each layer has its own term, which is 1 for uniform routing,
    whereas transformers pools the layers, and its term is then top_k.
    """

    default: float = AUX
    biased: bool = False
    """Whether there is also an update of the selection bias."""

    def read(self, config: ConfigReader) -> Values:
        """Read the coefficient; 0 is no term."""
        if not config.present("router_aux_loss_coef"):
            config.notes.append(
                "config.json has no router_aux_loss_coef: the coefficient of the aux loss is the "
                f"documented default of {config.model_type}, {self.default}"
            )
        coefficient = config.take("router_aux_loss_coef", float, self.default)
        aux = (Aux(coefficient=coefficient),) if coefficient > 0 else ()
        moving = BiasBalance().read(config)["balance"] if self.biased else ()
        return {"balance": (*moving, *aux)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the coefficient of the first aux loss, 0 without one."""
        found = (t.coefficient for t in model.balance if isinstance(t, Aux))
        return {"router_aux_loss_coef": next(found, 0.0)}


class BiasBalance(ConfigField):
    """Update of the selection bias at the rate of DeepSeek-V3's report; no field states it."""

    def read(self, config: ConfigReader) -> Values:
        """Return the update, and note the rate."""
        config.notes.append(f"the update rate of the selection bias is {RATE}, as in DeepSeek-V3")
        return {"balance": (Bias(rate=RATE),)}


@dataclass(frozen=True)
class SequenceBalance(BiasBalance):
    """Update of the selection bias, and DeepSeek's ``aux_loss_alpha``, by default per sequence."""

    alpha: float
    biased: bool = True

    def read(self, config: ConfigReader) -> Values:
        """Read the coefficient; 0 is no term."""
        if not config.present("aux_loss_alpha"):
            config.notes.append(
                "config.json has no aux_loss_alpha: the coefficient of the aux loss is that of "
                f"the model's report, {self.alpha}"
            )
        terms = super().read(config)["balance"] if self.biased else ()
        coefficient = config.take("aux_loss_alpha", float, self.alpha)
        over = "sequence" if config.take("seq_aux", bool, True) else "micro_batch"
        if coefficient > 0:
            terms = (*terms, Aux(over=over, coefficient=coefficient))
        return {"balance": terms}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields of the first aux loss."""
        aux = next((t for t in model.balance if isinstance(t, Aux)), None)
        return {
            "aux_loss_alpha": aux.coefficient if aux else 0.0,
            "seq_aux": aux is not None and aux.over == "sequence",
        }


class GroupLimits(ConfigField):
    """``n_group`` and ``topk_group``; one group means no groups."""

    def read(self, config: ConfigReader) -> Values:
        """Read both fields."""
        count, keep = config.take("n_group", int, 1), config.take("topk_group", int, 1)
        return {"groups": Groups(count=count, keep=keep) if count > 1 else None}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both fields."""
        groups = model.groups or Groups(count=1, keep=1)
        return {"n_group": groups.count, "topk_group": groups.keep}


class MethodGroups(ConfigField):
    """``topk_method``, which decides whether ``n_group`` and ``topk_group`` have an effect."""

    def read(self, config: ConfigReader) -> Values:
        """Read all three fields."""
        config.only("topk_method", "greedy", "group_limited_greedy")
        count, keep = config.take("n_group", int, 1), config.take("topk_group", int, 1)
        if config.take("topk_method", str, "greedy") == "greedy":
            return {"groups": None}
        return {"groups": Groups(count=count, keep=keep, score="max")}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return all three fields."""
        method = "group_limited_greedy" if model.groups else "greedy"
        return {**GroupLimits().write(model), "topk_method": method}


@dataclass(frozen=True)
class SharedNumber(ConfigField):
    """The shared expert's width as a number of routed experts."""

    name: str = "n_shared_experts"
    optional: bool = False
    """Whether there may be no shared expert."""
    each: str = "moe_intermediate_size"
    """Field of a routed expert's width."""

    def read(self, config: ConfigReader) -> Values:
        """Read the number, times the width of one."""
        number = config.take(self.name, int)
        width = number * config.take(self.each, int)
        return {"shape.shared_width": width or (None if self.optional else 0)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the quotient."""
        return {self.name: (model.shape.width_of_shared or 0) // model.shape.expert_width}


@dataclass(frozen=True)
class DenseSize(ConfigField):
    """Width of the dense layers."""

    name: str = "intermediate_size"
    other: str | None = None
    """Field to read if ``name`` is absent."""

    def read(self, config: ConfigReader) -> Values:
        """Read the width."""
        other = None if self.other is None else config.take(self.other, int)
        return {"shape.dense_width": config.take(self.name, int, other)}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse dense layers if no field states their width."""
        if model.shape.dense and not (config.present(self.name) or self.other):
            config.refuse(f"{self.name} is missing, but the model has dense layers")

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the width, or its default."""
        return {self.name: model.shape.width_of_dense}


def projection_bias(name: str, default: bool, parts: str = "qkv") -> FieldValue:
    """Return an entry for whether projections (``parts``, as in ``Gqa.bias``) have biases."""
    return FieldValue(name, "bias", bool, default, lambda on: parts if on else "none", _named)


def head_norm(name: str) -> FieldValue:
    """Return an entry for whether each head of queries and keys has a norm."""
    return FieldValue(name, "qk_norm", bool, False, lambda on: "head" if on else "none", _named)


def _named(kind: str) -> bool:
    return kind != "none"


LATENT_FIELDS = (
    Follows("num_key_value_heads", lambda model: model.shape.heads),
    Follows("head_dim", lambda model: model.shape.rope_dim),
    Follows("qk_head_dim", lambda model: model.shape.nope_dim + model.shape.rope_dim),
)
ROUTER_FIELDS = (GroupLimits(), FieldValue("norm_topk_prob", "renormalise", bool, True))


def deepseek_fields(scale: float) -> tuple[ConfigField, ...]:
    """Return entries for router, experts and dense layers as in DeepSeek-V3.

    ``scale``: default factor on routing weights.
    """
    factor = FieldValue("routed_scaling_factor", "scale", float, scale)
    return (*ROUTER_FIELDS, BiasBalance(), SharedNumber(), DenseSize(), factor)
