"""Fields of a ``config.json`` as data: each entry reads some of them and writes them again.

A family lists its entries; what it reads is given by the paths of its record, ``shape.heads`` or
``renormalise``. What an entry does not take, and no list of harmless fields names, is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from moefold.model.config import MultiToken
from moefold.model.families.hub import REQUIRED, SPECIAL, ConfigReader, read_rope, rope_fields
from moefold.moe.config import Aux, Bias, Groups

Values = dict[str, Any]
RATE = 1e-3
"""Of loss-free balancing, in DeepSeek-V3's report; no ``config.json`` states one."""
AUX = 1e-3
"""Coefficient of the aux loss by default of most classes of transformers."""


class ConfigField:
    """One or several fields of ``config.json``."""

    def read(self, config: ConfigReader) -> Values:
        """Take the fields; return values of the record by their paths."""
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields of a family's record."""
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse fields that contradict the record they were read into."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class FieldValue(ConfigField):
    """A field that is a value of the record, or another form of one."""

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED
    """Where it is absent or null."""
    into: Callable[[Any], Any] = _same
    """From the field's value to the record's."""
    back: Callable[[Any], Any] = _same

    def read(self, config: ConfigReader) -> Values:
        """Take it."""
        return {self.ours: self.into(config.take(self.theirs, self.kind, self.default))}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return it."""
        return {self.theirs: self.back(attrgetter(self.ours)(model))}


@dataclass(frozen=True)
class Only(ConfigField):
    """A field that must hold one value, or one of some that mean the same, where it stands."""

    name: str
    value: Any
    also: tuple[Any, ...] = ()

    def read(self, config: ConfigReader) -> Values:
        """Refuse any other value."""
        config.only(self.name, self.value, *self.also)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the first value."""
        return {self.name: self.value}


def only(**values: Any) -> tuple[Only, ...]:
    """Return fields that must hold one value each."""
    return tuple(Only(name, value) for name, value in values.items())


@dataclass(frozen=True)
class Unread(ConfigField):
    """Fields that change nothing in this family, whatever they hold."""

    names: tuple[str, ...]
    written: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: ConfigReader) -> Values:
        """Leave them out."""
        config.skip(*self.names)
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return those that a reader should find."""
        return self.written


NO_TOKENS = Unread(SPECIAL, dict.fromkeys(SPECIAL))
"""Special tokens that are none where a folder has none, and not the class's own."""


class FurtherTokens(ConfigField):
    """The number of blocks of further tokens."""

    def read(self, config: ConfigReader) -> Values:
        """Take it; what their losses weigh stands nowhere."""
        config.skip("num_mtp_layers")
        number = config.take("num_nextn_predict_layers", int, 0)
        return {"multi_token": (MultiToken(),) * number}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return it."""
        return {"num_nextn_predict_layers": len(model.multi_token)}


MULTI_TOKEN = Unread(
    ("num_nextn_predict_layers", "num_mtp_layers"), {"num_nextn_predict_layers": 0}
)
"""Blocks of further tokens where a family leaves them out."""


@dataclass(frozen=True)
class Follows(ConfigField):
    """A field that follows from others, and is refused where it does not."""

    name: str
    of: Callable[[Any], Any]

    def read(self, config: ConfigReader) -> Values:
        """Leave it for the check."""
        config.skip(self.name)
        return {}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Compare it with what follows."""
        config.only(self.name, self.of(model), None)

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return what follows."""
        return {self.name: self.of(model)}


def sparse_layers(model: Any) -> list[bool]:
    """Return for each layer of a model with listed dense layers whether it has experts."""
    return [layer not in model.shape.dense for layer in range(model.shape.layers)]


class KvHeads(ConfigField):
    """Key-value heads where the field is null: as many as heads. Else they are a size."""

    def read(self, config: ConfigReader) -> Values:
        """Take the heads where the field is null."""
        if not config.null("num_key_value_heads"):
            return {}
        return {"shape.kv_heads": config.take("num_attention_heads", int)}


@dataclass(frozen=True)
class HeadDim(ConfigField):
    """Dims per head; absent they are ``hidden / heads``, or the number that a class documents."""

    default: int | None = None

    def read(self, config: ConfigReader) -> Values:
        """Take them where they are stated."""
        head_dim = config.take("head_dim", int, self.default)
        return {} if head_dim is None else {"shape.head_dim": head_dim}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return them."""
        return {"head_dim": model.shape.dims_per_head}


@dataclass(frozen=True)
class Rotary(ConfigField):
    """Rotary positions, and the longest sequence beside them."""

    theta: float
    """Where none is stated."""
    layout: str = "half"
    switch: str | None = None
    """The field that says whether the layout is ``interleaved`` or ``half``."""
    scales_softmax: bool = False
    """Whether ``mscale_all_dim`` scales the softmax too."""
    fraction: float | None = None
    """Of a head's dims that turn, where none is stated; None is a family in which all do."""
    unstated: Mapping[str, Any] = field(default_factory=dict)
    """``rope_parameters`` where neither they nor ``rope_scaling`` are stated."""

    def read(self, config: ConfigReader) -> Values:
        """Take theta, YaRN and the layout."""
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
        """Return them; the layout, and how much of a head turns, where fields say it."""
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
    """Return key-value heads, dims per head, and rotary positions."""
    return KvHeads(), HeadDim(dim), Rotary(theta, layout, **more)


@dataclass(frozen=True)
class AuxField(ConfigField):
    """``router_aux_loss_coef``; where it is absent, the documented default is taken and reported.

    The number is taken as it stands. Here each layer has its own term, which is 1 for uniform
    routing; transformers pools the layers first, and its term is then top_k.
    """

    default: float = AUX
    biased: bool = False
    """Whether a selection bias moves too."""

    def read(self, config: ConfigReader) -> Values:
        """Take it; zero is no term."""
        if not config.present("router_aux_loss_coef"):
            config.notes.append(
                "router_aux_loss_coef is not in config.json: the documented default of "
                f"{config.model_type}, {self.default}, is the coefficient of the aux loss"
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
    """A selection bias that moves by the report's rate; no field says so."""

    def read(self, config: ConfigReader) -> Values:
        """Say the rate."""
        config.notes.append(f"the selection bias moves by {RATE} a step, as in the report")
        return {"balance": (Bias(rate=RATE),)}


@dataclass(frozen=True)
class SequenceBalance(BiasBalance):
    """A selection bias, and DeepSeek's ``aux_loss_alpha``, by default of each sequence."""

    alpha: float
    biased: bool = True

    def read(self, config: ConfigReader) -> Values:
        """Take the coefficient; zero is no term."""
        if not config.present("aux_loss_alpha"):
            config.notes.append(
                "config.json has no aux_loss_alpha: the aux loss of each sequence takes the "
                f"report's coefficient, {self.alpha}"
            )
        terms = super().read(config)["balance"] if self.biased else ()
        coefficient = config.take("aux_loss_alpha", float, self.alpha)
        over = "sequence" if config.take("seq_aux", bool, True) else "micro_batch"
        if coefficient > 0:
            terms = (*terms, Aux(over=over, coefficient=coefficient))
        return {"balance": terms}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the first aux loss."""
        aux = next((t for t in model.balance if isinstance(t, Aux)), None)
        return {
            "aux_loss_alpha": aux.coefficient if aux else 0.0,
            "seq_aux": aux is not None and aux.over == "sequence",
        }


class GroupLimits(ConfigField):
    """``n_group`` and ``topk_group``; one group is none."""

    def read(self, config: ConfigReader) -> Values:
        """Take both."""
        count, keep = config.take("n_group", int, 1), config.take("topk_group", int, 1)
        return {"groups": Groups(count=count, keep=keep) if count > 1 else None}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both."""
        groups = model.groups or Groups(count=1, keep=1)
        return {"n_group": groups.count, "topk_group": groups.keep}


class MethodGroups(ConfigField):
    """``topk_method``, which says whether ``n_group`` and ``topk_group`` are read."""

    def read(self, config: ConfigReader) -> Values:
        """Take all three."""
        config.only("topk_method", "greedy", "group_limited_greedy")
        count, keep = config.take("n_group", int, 1), config.take("topk_group", int, 1)
        if config.take("topk_method", str, "greedy") == "greedy":
            return {"groups": None}
        return {"groups": Groups(count=count, keep=keep, score="max")}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return all three."""
        method = "group_limited_greedy" if model.groups else "greedy"
        return {**GroupLimits().write(model), "topk_method": method}


@dataclass(frozen=True)
class SharedNumber(ConfigField):
    """The shared expert's width as a number of routed experts."""

    name: str = "n_shared_experts"
    optional: bool = False
    """Whether there may be none."""
    each: str = "moe_intermediate_size"
    """The field of one routed expert's width."""

    def read(self, config: ConfigReader) -> Values:
        """Take it times the width of one."""
        number = config.take(self.name, int)
        width = number * config.take(self.each, int)
        return {"shape.shared_width": width or (None if self.optional else 0)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the quotient."""
        return {self.name: (model.shape.width_of_shared or 0) // model.shape.expert_width}


@dataclass(frozen=True)
class DenseSize(ConfigField):
    """The dense layers' width."""

    name: str = "intermediate_size"
    other: str | None = None
    """The field that says it where this one does not."""

    def read(self, config: ConfigReader) -> Values:
        """Take it."""
        other = None if self.other is None else config.take(self.other, int)
        return {"shape.dense_width": config.take(self.name, int, other)}

    def check(self, config: ConfigReader, model: Any) -> None:
        """Refuse dense layers of which no field says how wide they are."""
        if model.shape.dense and not (config.present(self.name) or self.other):
            config.refuse(f"{self.name} is missing, and there are dense layers")

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return it, or what it follows from."""
        return {self.name: model.shape.width_of_dense}


def inverse(theirs: str, ours: str, default: float) -> FieldValue:
    """Return a field of which the record holds one over the value."""

    def over(value: float) -> float:
        return 1 / value if value else value  # 0 is refused as the record's

    return FieldValue(theirs, ours, float, default, over, over)


def projection_bias(name: str, default: bool, parts: str = "qkv") -> FieldValue:
    """Return whether projections have biases; ``parts`` says which, as attention's record does."""
    return FieldValue(name, "bias", bool, default, lambda on: parts if on else "none", _named)


def head_norm(name: str) -> FieldValue:
    """Return whether each head of queries and keys has a norm."""
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
    """Return fields of router, experts and dense layers as DeepSeek-V3 has them.

    ``scale`` is what the factor on weights is where it is absent.
    """
    factor = FieldValue("routed_scaling_factor", "scale", float, scale)
    return (*ROUTER_FIELDS, BiasBalance(), SharedNumber(), DenseSize(), factor)
