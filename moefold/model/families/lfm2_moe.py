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
_OURS, _AT = "layers.{i}", "model.layers.{i}"
_FFN = f"{_AT}.feed_forward"
_ALL, _EACH = f"{_FFN}.experts", f"{_FFN}.experts.{{e}}"
_GATE_UP = f"{_EACH}.w1.weight", f"{_EACH}.w3.weight"
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
_ATTENTION |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
_PLAIN = {"attention_norm.weight": "operator_norm.weight", "ffn_norm.weight": "ffn_norm.weight"}
_PLAIN |= {"attention.taps": "conv.conv.weight", "attention.out.weight": "conv.out_proj.weight"}
_PLAIN |= {"ffn.w_out": "feed_forward.w2.weight", "moe.router.weight": "feed_forward.gate.weight"}
_PLAIN |= {"moe.router.selection_bias": "feed_forward.expert_bias"}


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
    tensors = (
        names.entry("embed.weight", "model.embed_tokens.weight"),
        names.entry("norm.weight", "model.embedding_norm.weight"),
        names.entry("head.weight", "lm_head.weight"),
        *names.layer_names(_PLAIN),
        *names.attention_names(_ATTENTION),
        names.Entry(f"{_OURS}.attention.w_in", (f"{_AT}.conv.in_proj.weight",), fused=True),
        names.entry(f"{_OURS}.ffn.w_in", f"{_FFN}.w1.weight", f"{_FFN}.w3.weight"),
        names.entry(f"{_OURS}.moe.experts.w_in", *_GATE_UP, packed=f"{_ALL}.gate_up_proj"),
        names.entry(f"{_OURS}.moe.experts.w_out", f"{_EACH}.w2.weight", packed=f"{_ALL}.down_proj"),
    )
