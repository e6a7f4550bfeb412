"""Kimi-Linear: delta nets with decays per channel, latent attention without positions."""

from typing import Literal

from moefold.layers.config import Positive
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import layer_kinds as kinds
from moefold.model.families import names
from moefold.model.families.mixed_sizes import LowRankSizes
from moefold.model.families.sigmoid import LATENT, SIZES, SigmoidFamily

RENAMED = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}
FORGET = {"forget_gate.": ""}
MOE = {".mlp.": ".block_sparse_moe."}
EXPERTS = {"}.gate_proj": "}.w1", "}.up_proj": "}.w3", "}.down_proj": "}.w2"}
GATES = {"decay_down": "forget_gate.f_a_proj", "decay_in": "forget_gate.f_b_proj"}
GATES |= {"gate_down": "g_a_proj", "gate_in": "g_b_proj"}


@MODEL.register
class KimiLinear(SigmoidFamily):
    """A Kimi-Linear."""

    family: Literal["kimi_linear"] = "kimi_linear"
    shape: LowRankSizes
    scale: Positive = 2.446
    norm_epsilon: Positive = 1e-5

    architecture = "KimiLinearForCausalLM"
    has_rope = False
    extra_layers = "layers for multi-token prediction"
    hf_sizes = SIZES
    renamed_fields = RENAMED
    fields = (
        LATENT,
        hf.Derived("num_key_value_heads", lambda model: model.shape.heads),
        hf.Ignored(("head_dim", "qk_head_dim")),  # no layer uses them
        *hf.deepseek_fields(2.446),
        hf.Ignored(("rope_theta", "rope_scaling", "rope_parameters")),  # no layer has positions
        hf.FieldValue("max_position_embeddings", "context", int, None, to_hf=lambda n: n or 4096),
        hf.Fixed("mla_use_nope", True),
        kinds.KimiDeltaNets(),
        kinds.MixerKinds("linear_attention", kinds.kimi_full),
        kinds.DenseKinds(count_field="first_k_dense_replace"),
        *hf.fixed(moe_layer_freq=1, moe_router_activation_func="sigmoid"),
        *hf.fixed(topk_method="noaux_tc", use_grouped_topk=True),
        hf.MULTI_TOKEN,
        hf.NULL_TOKENS,
    )
    tensors = (
        *names.renamed(names.llama_names(), {}, MOE),
        *names.renamed(
            (
                *names.latent_names(),
                *names.channel_delta_names(GATES, (2, 1)),
                *names.expert_names(),
                *names.bias_names(),
                *names.shared_names(),
            ),
            FORGET | MOE | EXPERTS,
        ),
    )
