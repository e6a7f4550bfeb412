"""Descriptors of fields of ``config.json`` that only one family has."""

from collections.abc import Mapping
from typing import Any

from moefold.layers.config import Activation
from moefold.model.families.fields import (
    BiasBalance,
    ConfigField,
    Derived,
    FieldValue,
    Ignored,
    Values,
    fixed,
    sparse_layers,
)
from moefold.model.families.hub import ConfigReader
from moefold.model.families.layer_kinds import WindowKinds

_STRATEGY = "shared_expert_combination_strategy"


class NullableFactor(FieldValue):
    """A factor that is 1 if its field is null."""

    def read(self, config: ConfigReader) -> Values:
        """Read the factor."""
        values = super().read(config)
        return {self.path: 1.0} if config.is_null(self.name) else values


class BiasSwitch(BiasBalance):
    """``use_expert_bias``: whether there is a selection bias, with its update."""

    def read(self, config: ConfigReader) -> Values:
        has_bias = config.get("use_expert_bias", bool, True)
        balance = super().read(config) if has_bias else {"balance": ()}
        return balance | {"selection_bias": has_bias}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {"use_expert_bias": model.selection_bias}


class TiedField(ConfigField):
    """``tie_embedding``, which takes precedence over ``tie_word_embeddings``."""

    def read(self, config: ConfigReader) -> Values:
        tied = config.get("tie_embedding", bool, None)
        return {} if tied is None else {"tied": tied}


class MupScale(ConfigField):
    """``mup_enabled``: whether embedded rows are scaled by ``sqrt(hidden)``."""

    def read(self, config: ConfigReader) -> Values:
        scaled = config.get("mup_enabled", bool, False)
        return {"embed_scale": config.get("hidden_size", int) ** 0.5 if scaled else 1.0}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the switch.

        Raises:
            ValueError: if the factor is neither 1 nor the square root.
        """
        root = model.shape.hidden**0.5
        factor = model.embed_scale
        if factor not in (1.0, root):
            raise ValueError(f"embed_scale is {factor}; {model.model_type} supports 1 or {root}")
        return {"mup_enabled": factor == root}


class SharedCombination(ConfigField):
    """Whether the output is the mean of routed and shared experts, or their sum."""

    def read(self, config: ConfigReader) -> Values:
        """Read the strategy, which has no effect without a shared expert."""
        strategy = config.get(_STRATEGY, str, "average")
        if strategy not in ("average", "sum"):
            config.add_problem(f"{_STRATEGY} is {strategy!r}; supported: 'average' or 'sum'")
        shared = config.get("num_shared_experts", int, 0)
        return {"scale": 0.5 if shared and strategy == "average" else 1.0}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the strategy.

        Raises:
            ValueError: if the factor belongs to neither.
        """
        if model.scale not in ((1.0, 0.5) if model.shape.resolved_shared_width else (1.0,)):
            raise ValueError(f"scale is {model.scale}; supported: 1, or 0.5 with shared_width")
        return {_STRATEGY: "sum" if model.scale == 1 else "average"}


class SwigluFields(ConfigField):
    """gpt-oss's activation: ``swiglu_alpha``, ``swiglu_limit``, and 1 added to ``up``."""

    def read(self, config: ConfigReader) -> Values:
        alpha = config.get("swiglu_alpha", float, 1.702)
        limit = config.get("swiglu_limit", float, 7.0)
        return {"activation": Activation(alpha=alpha, limit=limit, offset=1.0)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both fields.

        Raises:
            ValueError: for an activation that the fields cannot express.
        """
        activation = model.activation
        if activation.offset != 1 or activation.limit is None:
            raise ValueError(f"activation is {activation!r}; it must have a limit and offset 1")
        return {"swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit}


class ExpertSelection(ConfigField):
    """Weights of chosen experts: ``expert_selection_fn`` and ``norm_topk_prob``."""

    def read(self, config: ConfigReader) -> Values:
        score = config.get("expert_selection_fn", str, "softmax")
        if score not in ("softmax", "sigmoid"):
            config.add_problem(
                f"expert_selection_fn is {score!r}; supported: 'softmax' or 'sigmoid'"
            )
        normalised = config.get("norm_topk_prob", bool, True)
        sigmoid = "shares" if normalised else "sigmoid"
        return {"weights": sigmoid if score == "sigmoid" else "softmax"}

    def write(self, model: Any) -> Mapping[str, Any]:
        score = "softmax" if model.weights == "softmax" else "sigmoid"
        return {"expert_selection_fn": score, "norm_topk_prob": model.weights != "sigmoid"}


class NormKind(ConfigField):
    """``rms_norm_eps``: if null, norms are LayerNorms, and another field has epsilon."""

    def read(self, config: ConfigReader) -> Values:
        epsilon = config.get("rms_norm_eps", float, None)
        return {"norm": "layer"} if epsilon is None else {"norm": "rms", "norm_epsilon": epsilon}

    def write(self, model: Any) -> Mapping[str, Any]:
        return {"rms_norm_eps": model.norm_epsilon if model.norm == "rms" else None}


class ExclusiveWindow(WindowKinds):
    """Window and layer kinds; ``sliding_window_size`` does not count the token itself."""

    def read(self, config: ConfigReader) -> Values:
        """Read both; ``sliding_window_size`` of released folders takes precedence."""
        values = super().read(config)
        size = config.get("sliding_window_size", int, None)
        return values | ({"shape.window": size + 1} if values and size else {})


def _sliding_pattern(model: Any) -> list[int]:
    layers = range(model.shape.layers)
    full = layers if model.shape.window is None else model.shape.full_layers
    return [int(layer not in full) for layer in layers]


MIMO: tuple[ConfigField, ...] = (
    *fixed(add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True),
    *fixed(n_shared_experts=None, scoring_func="sigmoid", topk_method="noaux_tc"),
    Derived("hybrid_layer_pattern", _sliding_pattern),
    Derived("layernorm_epsilon", lambda model: model.norm_epsilon),
    Derived("moe_layer_freq", lambda model: [*map(int, sparse_layers(model))]),
    Derived("swa_head_dim", lambda model: model.shape.resolved_head_dim),
    Derived("swa_num_attention_heads", lambda model: model.shape.heads),
    Derived("swa_num_key_value_heads", lambda model: 2 * model.shape.kv_heads),
    Derived("swa_v_head_dim", lambda model: model.shape.v_dim),
    Ignored(("attention_chunk_size",)),
)
"""Fields of the released MiMo-V2-Flash that are redundant or must have fixed values."""
