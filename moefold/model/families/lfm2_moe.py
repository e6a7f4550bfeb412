"""LFM2-MoE: short convolutions and grouped-query attention, sigmoid scores, a selection bias."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import MixerKinds
from moefold.model.families.mixed_sizes import ConvolutionSizes
from moefold.model.families.special_fields import BiasSwitch, TiedField
from moefold.moe.config import Bias

_THETA = 1e6
_LAYER = "layers.{i}"
_EXPERTS = "layers.{i}.moe.experts"
_HF = "model.layers.{i}"
_FFN = f"{_HF}.feed_forward"
_PACKED = f"{_FFN}.experts"
_EXPERT = f"{_FFN}.experts.{{e}}"
_GATE_UP = f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
_ATTENTION |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
_NAMES = {"attention_norm.weight": "operator_norm.weight", "ffn_norm.weight": "ffn_norm.weight"}
_NAMES |= {"attention.taps": "conv.conv.weight", "attention.out.weight": "conv.out_proj.weight"}
_NAMES |= {"ffn.w_out": "feed_forward.w2.weight", "moe.router.weight": "feed_forward.gate.weight"}
_NAMES |= {"moe.router.selection_bias": "feed_forward.expert_bias"}


@MODEL.register
class Lfm2Moe(Family):
    """An LFM2-MoE."""

    family: Literal["lfm2_moe"] = "lfm2_moe"
    shape: ConvolutionSizes
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: Positive = 1.0
    """Factor on the weights of routed experts."""
    selection_bias: bool = True
    """Whether a bias is added to the scores for the choice, but not for the weights."""
    balance: Balance = (Bias(rate=hf.BIAS_RATE),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5
    tied: bool = True

    architecture = "Lfm2MoeForCausalLM"
    attention_fixed = {"qk_norm": "head"}
    router_fixed = {"score": "sigmoid", "epsilon": 1e-6}
    router_fields = ("renormalise", "scale", "selection_bias")
    field_defaults = {"tie_word_embeddings": True}
    epsilon_field = "norm_eps"
    hf_sizes = names.gqa_sizes(
        "num_experts", "moe_intermediate_size", num_dense_layers="dense_layers", conv_L_cache="taps"
    )
    fields = (
        hf.KvHeads(),
        hf.Derived("head_dim", lambda model: model.shape.resolved_head_dim),
        hf.Rotary(_THETA),
        TiedField(),
        hf.DenseWidthField(),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, True),
        hf.FieldValue("routed_scaling_factor", "scale", float, 1.0),
        hf.Fixed("conv_bias", False),
        BiasSwitch(),
        MixerKinds(),
    )
    tensors = (
        names.param("embed.weight", "model.embed_tokens.weight"),
        names.param("norm.weight", "model.embedding_norm.weight"),
        names.param("head.weight", "lm_head.weight"),
        *names.layer_names(_NAMES),
        *names.attention_names(_ATTENTION),
        names.ParamMapping(f"{_LAYER}.attention.w_in", (f"{_HF}.conv.in_proj.weight",), fused=True),
        names.param(f"{_LAYER}.ffn.w_in", f"{_FFN}.w1.weight", f"{_FFN}.w3.weight"),
        names.param(f"{_EXPERTS}.w_in", *_GATE_UP, packed=f"{_PACKED}.gate_up_proj"),
        names.param(f"{_EXPERTS}.w_out", f"{_EXPERT}.w2.weight", packed=f"{_PACKED}.down_proj"),
    )
