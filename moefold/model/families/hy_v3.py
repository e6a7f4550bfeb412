"""Hunyuan 3: norms per head, sigmoid scores always renormalised and scaled, a shared expert."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import DenseKinds
from moefold.model.families.sigmoid import SIGMOID
from moefold.model.families.sizes import DenseListed, FreeGqaSizes, SharedSizes
from moefold.moe.config import Bias

_THETA = 11_158_840.0
_RELEASED = "moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm"
_UNREAD = """
enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine eod_token_id
use_grouped_mm
"""
"""Fields for number formats and kernels, and a special token, without effect here."""


class HyV3Shape(FreeGqaSizes, SharedSizes, DenseListed):
    """Sizes of a Hunyuan 3."""


@MODEL.register
class HyV3(Family):
    """A Hunyuan 3."""

    family: Literal["hy_v3"] = "hy_v3"
    shape: HyV3Shape
    scale: Positive = 2.826
    """Factor on the weights of routed experts."""
    balance: Balance = (Bias(rate=hf.BIAS_RATE),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5

    architecture = "HYV3ForCausalLM"
    field_defaults = {"initializer_range": 0.006}
    extra_layers = "layers for multi-token prediction"
    attention_fixed = {"qk_norm": "head"}
    router_fixed = SIGMOID
    router_fields = ("scale",)
    hf_sizes = names.gqa_sizes("num_experts", "moe_intermediate_size")
    fields = (
        *hf.head_fields(128, _THETA),
        hf.BiasBalance(),
        hf.SharedExpertCount("num_shared_experts"),
        DenseKinds(),
        hf.Derived("first_k_dense_replace", lambda model: len(model.shape.dense)),
        hf.DenseWidthField(),
        hf.FieldValue("router_scaling_factor", "scale", float, 2.826),
        hf.Derived("expert_hidden_dim", lambda model: model.shape.expert_width),
        *(hf.Fixed(name, True) for name in _RELEASED),
        hf.Ignored(tuple(_UNREAD.split())),
        hf.MULTI_TOKEN,
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(qk_norm=True),
        *names.expert_names("router.gate.weight"),
        *names.bias_names("mlp.expert_bias", "mlp.e_score_correction_bias"),
        *names.shared_names("shared_mlp", "shared_experts"),
    )
