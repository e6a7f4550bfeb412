"""MiMo-V2-Flash: windowed layers with sinks and twice the key-value heads, narrow values."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.layer_kinds import DenseKinds, RotaryByKind
from moefold.model.families.mixed_sizes import TwoKindSizes
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.special_fields import MIMO, ExclusiveWindow, NullableFactor

_THETA = 5e6
_FRACTION = 0.334


@MODEL.register
class MiMoV2Flash(SigmoidFamily):
    """A MiMo-V2-Flash."""

    family: Literal["mimo_v2_flash"] = "mimo_v2_flash"
    shape: TwoKindSizes
    scale: Positive = 1.0
    bias: Literal["none", "qkv"] = "none"
    """Whether queries, keys and values have biases."""
    value_scale: Positive = 0.707
    """Factor on values."""
    rope: Rope = Rope(theta=_THETA, fraction=_FRACTION)
    norm_epsilon: Positive = 1e-5

    architecture = "MiMoV2FlashForCausalLM"
    field_defaults = {"rms_norm_eps": 1e-5}
    attention_fields = ("bias", "value_scale")
    hf_sizes = names.gqa_sizes("n_routed_experts", "moe_intermediate_size", v_head_dim="v_dim")
    fields = (
        *hf.ROUTER_FIELDS,
        hf.HeadDim(192),
        RotaryByKind(_THETA, fraction=_FRACTION),
        hf.BiasBalance(),
        DenseKinds(),
        hf.DenseWidthField(),
        ExclusiveWindow(lambda config, layer: layer == 0 or (layer + 1) % 6 == 0),
        hf.bias_field("attention_bias", False),
        hf.FieldValue("routed_scaling_factor", "scale", float, 1.0),
        NullableFactor("attention_value_scale", "value_scale", float, 0.707),
        *MIMO,
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.projection_bias_names(),
        names.param(
            "layers.{i}.attention.sinks",
            "model.layers.{i}.self_attn.attention_sink_bias",
            packed="model.layers.{i}.self_attn.sinks",
        ),
        *names.expert_names(),
        *names.bias_names(),
    )
