"""FlexOlmo (arXiv 2507.07024): norms after each sublayer, and q/k norms over whole projections."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.sizes import GqaSizes
from moefold.moe.config import Aux

_AUX = 1e-2
_THETA = 5e5


@MODEL.register
class FlexOlmo(Family):
    """A FlexOlmo."""

    family: Literal["flex_olmo"] = "flex_olmo"
    shape: GqaSizes
    renormalise: bool = False
    """Whether the chosen probabilities are divided by their sum."""
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    balance: Balance = (Aux(coefficient=_AUX),)
    rope: Rope = Rope(theta=_THETA)

    architecture = "FlexOlmoForCausalLM"
    hf_sizes = names.gqa_sizes("num_experts", "intermediate_size")
    attention_fixed = {"qk_norm": "projection"}
    attention_fields = ("bias",)
    block_fixed = {"norms": "after"}
    router_fields = ("renormalise",)
    fields = (
        hf.KvHeads(),
        hf.Rotary(_THETA),
        hf.AuxLossField(_AUX),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, False),
        hf.bias_field("attention_bias", False, "all"),
        hf.Derived("head_dim", lambda model: model.shape.resolved_head_dim),
        hf.NULL_TOKENS,
    )
    tensors = (
        *names.llama_names("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        *names.gqa_names(qk_norm=True),
        *names.projection_bias_names("qkvo"),
        *names.expert_names(),
    )
