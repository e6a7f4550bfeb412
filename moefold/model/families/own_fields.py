"""Entries for fields of ``config.json`` that only single families have."""

from collections.abc import Mapping
from typing import Any

from moefold.layers.config import Activation
from moefold.model.families.fields import (
    BiasBalance,
    ConfigField,
    FieldValue,
    Follows,
    Unread,
    Values,
    only,
    sparse_layers,
)
from moefold.model.families.hub import ConfigReader
from moefold.model.families.layer_kinds import WindowKinds

_STRATEGY = "shared_expert_combination_strategy"


class Factor(FieldValue):
    """A factor that is 1 if its field is null."""

    def read(self, config: ConfigReader) -> Values:
        """Read the factor."""
        stated = super().read(config)
        return {self.ours: 1.0} if config.null(self.theirs) else stated


class BiasSwitch(BiasBalance):
    """``use_expert_bias``: whether there is a selection bias, with its update."""

    def read(self, config: ConfigReader) -> Values:
        """Read the switch."""
        stated = config.take("use_expert_bias", bool, True)
        moving = super().read(config) if stated else {"balance": ()}
        return moving | {"selection_bias": stated}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the switch."""
        return {"use_expert_bias": model.selection_bias}


class Tied(ConfigField):
    """``tie_embedding``, which takes precedence over ``tie_word_embeddings``."""

    def read(self, config: ConfigReader) -> Values:
        """Read the field if it is present."""
        tied = config.take("tie_embedding", bool, None)
        return {} if tied is None else {"tied": tied}


class RootScale(ConfigField):
    """``mup_enabled``: whether embedded rows are scaled by ``sqrt(hidden)``."""

    def read(self, config: ConfigReader) -> Values:
        """Read the switch."""
        scaled = config.take("mup_enabled", bool, False)
        return {"embed_scale": config.take("hidden_size", int) ** 0.5 if scaled else 1.0}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the switch.

        Raises:
            ValueError: if the factor is neither 1 nor the root.
        """
        root, factor = model.shape.hidden**0.5, model.embed_scale
        if factor not in (1.0, root):
            raise ValueError(f"embed_scale is {factor}; {model.model_type} supports 1 or {root}")
        return {"mup_enabled": factor == root}


class SharedMean(ConfigField):
    """Whether the output is the mean of routed and shared experts, or their sum."""

    def read(self, config: ConfigReader) -> Values:
        """Read the strategy, which has no effect without a shared expert."""
        said = config.take(_STRATEGY, str, "average")
        if said not in ("average", "sum"):
            config.refuse(f"{_STRATEGY} is {said!r}; supported: 'average' or 'sum'")
        shared = config.take("num_shared_experts", int, 0)
        return {"scale": 0.5 if shared and said == "average" else 1.0}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the strategy.

        Raises:
            ValueError: if the factor is that of neither.
        """
        if model.scale not in ((1.0, 0.5) if model.shape.width_of_shared else (1.0,)):
            raise ValueError(f"scale is {model.scale}; supported: 1, or 0.5 with shared_width")
        return {_STRATEGY: "sum" if model.scale == 1 else "average"}


class Swish(ConfigField):
    """gpt-oss's activation: ``swiglu_alpha``, ``swiglu_limit``, and 1 added to ``up``."""

    def read(self, config: ConfigReader) -> Values:
        """Read both fields."""
        alpha = config.take("swiglu_alpha", float, 1.702)
        limit = config.take("swiglu_limit", float, 7.0)
        return {"activation": Activation(alpha=alpha, limit=limit, offset=1.0)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both fields.

        Raises:
            ValueError: for an activation that the fields cannot express.
        """
        made = model.activation
        if made.offset != 1 or made.limit is None:
            raise ValueError(f"activation is {made!r}; it must have a limit and offset 1")
        return {"swiglu_alpha": made.alpha, "swiglu_limit": made.limit}


class Selection(ConfigField):
    """Weights of chosen experts: ``expert_selection_fn`` and ``norm_topk_prob``."""

    def read(self, config: ConfigReader) -> Values:
        """Read both fields."""
        score = config.take("expert_selection_fn", str, "softmax")
        if score not in ("softmax", "sigmoid"):
            config.refuse(f"expert_selection_fn is {score!r}; supported: 'softmax' or 'sigmoid'")
        shares = config.take("norm_topk_prob", bool, True)
        return {"weights": {"sigmoid": "shares" if shares else "sigmoid"}.get(score, "softmax")}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both fields."""
        score = "softmax" if model.weights == "softmax" else "sigmoid"
        return {"expert_selection_fn": score, "norm_topk_prob": model.weights != "sigmoid"}


class NormKind(ConfigField):
    """``rms_norm_eps``: if null, norms are LayerNorms, with another field for epsilon."""

    def read(self, config: ConfigReader) -> Values:
        """Read the field."""
        epsilon = config.take("rms_norm_eps", float, None)
        return {"norm": "layer"} if epsilon is None else {"norm": "rms", "norm_epsilon": epsilon}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the field."""
        return {"rms_norm_eps": model.norm_epsilon if model.norm == "rms" else None}


class WindowBeside(WindowKinds):
    """Window and kinds of layers; ``sliding_window_size`` does not count the token itself."""

    def read(self, config: ConfigReader) -> Values:
        """Read both; ``sliding_window_size`` of released folders takes precedence."""
        found, beside = super().read(config), config.take("sliding_window_size", int, None)
        return found | ({"shape.window": beside + 1} if found and beside else {})


def _windowed(model: Any) -> list[int]:
    layers = range(model.shape.layers)
    full = layers if model.shape.window is None else model.shape.full_layers
    return [int(layer not in full) for layer in layers]


MIMO: tuple[ConfigField, ...] = (
    *only(add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True),
    *only(n_shared_experts=None, scoring_func="sigmoid", topk_method="noaux_tc"),
    Follows("hybrid_layer_pattern", _windowed),
    Follows("layernorm_epsilon", lambda model: model.norm_epsilon),
    Follows("moe_layer_freq", lambda model: [*map(int, sparse_layers(model))]),
    Follows("swa_head_dim", lambda model: model.shape.dims_per_head),
    Follows("swa_num_attention_heads", lambda model: model.shape.heads),
    Follows("swa_num_key_value_heads", lambda model: 2 * model.shape.kv_heads),
    Follows("swa_v_head_dim", lambda model: model.shape.v_dim),
    Unread(("attention_chunk_size",)),
)
"""Fields of the released MiMo-V2-Flash that are redundant, or must have fixed values."""
