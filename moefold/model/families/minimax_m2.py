"""MiniMax-M2: norms over whole projections, half of a head turns, sigmoid scores renormalised."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import RATE, AuxField, HeadDim, KvHeads, Only, Rotary, Unread
from moefold.model.families.names import bias_names, gqa_names, gqa_sizes, llama_names, w123_names
from moefold.model.families.sigmoid import SIGMOID
from moefold.model.families.sizes import FreeGqaSizes
from moefold.moe.config import Aux, Bias

_THETA, _AUX = 5e6, 1e-3
_UNREAD = """
attn_type_list layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
mlp_intermediate_size mtp_transformer_layers num_mtp_modules shared_moe_mode use_mtp
"""
"""Of released folders; transformers reads none of them for this model."""


@MODEL.register
class MinimaxM2(Family):
    """A MiniMax-M2."""

    family: Literal["minimax_m2"] = "minimax_m2"
    shape: FreeGqaSizes
    balance: Balance = (Bias(rate=RATE), Aux(coefficient=_AUX))
    rope: Rope = Rope(theta=_THETA, fraction=0.5)

    architecture = "MiniMaxM2ForCausalLM"
    extra_layers = "layers for multi-token prediction"
    attention_own = {"qk_norm": "projection"}
    router_own = SIGMOID | {"epsilon": 0.0}
    hf_sizes = gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        KvHeads(),
        HeadDim(128),
        Rotary(_THETA, fraction=1.0),
        AuxField(_AUX, biased=True),
        Only("router_jitter_noise", 0.0, (0, None)),
        Only("scoring_func", "sigmoid"),
        Only("qk_norm_type", "per_layer"),
        Only("use_qk_norm", True),
        Only("use_routing_bias", True),
        Only("shared_intermediate_size", 0),
        Only("sliding_window", None),
        Unread(tuple(_UNREAD.split())),
    )
    tensors = (
        *llama_names(),
        *gqa_names(qk_norm=True),
        *w123_names(),
        *bias_names("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
    )
