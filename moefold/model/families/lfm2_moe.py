"""LFM2-MoE: short convolutions and grouped-query attention, sigmoid scores, a selection bias."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import ConvolvedKinds
from moefold.model.families.mixed_sizes import ConvolvedSizes
from moefold.model.families.own_fields import BiasSwitch, Tied
from moefold.moe.config import Bias

_THETA = 1e6


@MODEL.register
class Lfm2Moe(Family):
    """An LFM2-MoE."""

    family: Literal["lfm2_moe"] = "lfm2_moe"
    shape: ConvolvedSizes
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: Positive = 1.0
    """Factor on the weights of routed experts."""
    selection_bias: bool = True
    """Whether a bias is added to the scores for the choice, but not for the weights."""
    balance: Balance = (Bias(rate=hf.RATE),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5
    tied: bool = True

    architecture = "Lfm2MoeForCausalLM"
    attention_own = {"qk_norm": "head"}
    router_own = {"score": "sigmoid", "epsilon": 1e-6}
    router_fields = ("renormalise", "scale", "selection_bias")
    unstated = {"tie_word_embeddings": True}
    epsilon_field = "norm_eps"
    hf_sizes = names.gqa_sizes(
        "num_experts", "moe_intermediate_size", num_dense_layers="dense_layers", conv_L_cache="taps"
    )
    fields = (
        hf.KvHeads(),
        hf.Follows("head_dim", lambda model: model.shape.dims_per_head),
        hf.Rotary(_THETA),
        Tied(),
        hf.DenseSize(),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, True),
        hf.FieldValue("routed_scaling_factor", "scale", float, 1.0),
        hf.Only("conv_bias", False),
        BiasSwitch(),
        ConvolvedKinds(),
    )
    tensors = names.lfm2_names()
