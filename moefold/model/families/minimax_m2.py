"""MiniMax-M2: norms over whole projections, partial rotation, sigmoid scores renormalised."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.sigmoid import SIGMOID
from moefold.model.families.sizes import FreeGqaSizes
from moefold.moe.config import Aux, Bias

_THETA = 5e6
_UNREAD = """
attn_type_list layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
mlp_intermediate_size mtp_transformer_layers num_mtp_modules shared_moe_mode use_mtp
"""
"""Fields of released folders that transformers does not read for this model."""


@MODEL.register
class MinimaxM2(Family):
    """A MiniMax-M2."""

    family: Literal["minimax_m2"] = "minimax_m2"
    shape: FreeGqaSizes
    balance: Balance = (Bias(rate=hf.BIAS_RATE), Aux(coefficient=hf.AUX_COEFFICIENT))
    rope: Rope = Rope(theta=_THETA, fraction=0.5)

    architecture = "MiniMaxM2ForCausalLM"
    extra_layers = "layers for multi-token prediction"
    attention_fixed = {"qk_norm": "projection"}
    router_fixed = SIGMOID | {"epsilon": 0.0}
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *hf.head_fields(128, _THETA, fraction=1.0),
        hf.AuxLossField(with_bias=True),
        hf.Fixed("router_jitter_noise", 0.0, (0, None)),
        *hf.fixed(scoring_func="sigmoid", qk_norm_type="per_layer", use_qk_norm=True),
        *hf.fixed(use_routing_bias=True, shared_intermediate_size=0, sliding_window=None),
        hf.Ignored(tuple(_UNREAD.split())),
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(qk_norm=True),
        *names.w123_names(),
        *names.bias_names(
            "block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"
        ),
    )
