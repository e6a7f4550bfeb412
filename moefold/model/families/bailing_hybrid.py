"""Ling 3.0: delta nets with decays per channel, latent attention with a gate per head."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import layer_kinds as kinds
from moefold.model.families import names
from moefold.model.families.kimi_linear import FORGET, RENAMED
from moefold.model.families.mixed_sizes import BoundedSizes
from moefold.model.families.sigmoid import LATENT, SIZES, SigmoidFamily

_THETA = 6e6
RELEASED = {"score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
RELEASED |= {"moe_router_enable_expert_bias": True, "no_kda_lora": True, "rope_interleave": True}
RELEASED |= {"gated_attention_proj_granularity_type": "head_wise", "use_qk_norm": True}
RELEASED |= {"group_norm_size": 1, "linear_silu": True}
RELEASED |= {"embedding_dropout": 0.0, "output_dropout": 0.0}
_OFF = "scale_router_input up_proj_norm use_bias use_kda_lora use_mla_nope use_nGPT use_qkv_bias"
RELEASED |= dict.fromkeys([*_OFF.split(), "value_norm"], False)
PARTS = {"embed_tokens": "word_embeddings", "e_score_correction_bias": "expert_bias"}
PARTS |= {"self_attn.": "attention.", **FORGET}
GATES = {"decay_in": "forget_gate.f_proj", "gate_in": "g_proj", "out_gate": "g_proj"}


@MODEL.register
class BailingHybrid(SigmoidFamily):
    """A Ling 3.0."""

    family: Literal["bailing_hybrid"] = "bailing_hybrid"
    shape: BoundedSizes
    rope: Rope = Rope(theta=_THETA, layout="interleaved")

    architecture = "BailingHybridForCausalLM"
    other_architectures = ("BailingMoeV3ForCausalLM",)
    field_defaults = {"n_group": 8, "topk_group": 4}
    fixed_rope = "interleaved"
    scales_softmax = True
    extra_layers = "layers for multi-token prediction"
    attention_fixed = {"gate": True}
    hf_sizes = SIZES
    renamed_fields = RENAMED | {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    fields = (
        LATENT,
        hf.Derived("num_key_value_heads", lambda model: model.shape.heads),
        *hf.deepseek_fields(2.5),
        hf.Rotary(_THETA, "interleaved", scales_softmax=True),
        kinds.LingDeltaNets(),
        hf.Derived("linear_num_heads", lambda model: model.shape.heads),
        kinds.MixerKinds("linear_attention", kinds.every_nth_full("layer_group_size", 6)),
        hf.Ignored(("layer_group_size", "mtp_loss_scaling_factor", "mtp_use_kda", "router_dtype")),
        hf.Ignored(("partial_rotary_factor", "rotary_dim", "qk_head_dim")),  # implied by rope_dim
        hf.Derived("moe_shared_expert_intermediate_size", lambda model: model.shape.expert_width),
        kinds.DenseKinds(2, "first_k_dense_replace"),
        *hf.fixed(**RELEASED),
        hf.MULTI_TOKEN,
        hf.NULL_TOKENS,
    )
    tensors = names.renamed(
        (
            *names.deepseek_names(),
            *names.latent_names(),
            *names.channel_delta_names(GATES, (0, 0)),
        ),
        PARTS | {"o_proj": "dense"},
        PARTS,
    )
