"""Kolibri 1: experts chosen by logit plus bias and weighted by sigmoid, windows, no positions in
full layers, norms before and after each sublayer, a shared expert."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import WindowKinds
from moefold.model.families.sizes import AlwaysSharedSizes, WindowSizes
from moefold.moe.config import Bias

_NORMS = {"post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"}
"""Names of norms in folders, by those that transformers gives them once they are loaded."""


class Kolibri1Shape(WindowSizes, AlwaysSharedSizes):
    """Sizes of a Kolibri 1; full layers have no positions if others have a window."""

    full_rope = False


@MODEL.register
class Kolibri1(Family):
    """A Kolibri 1."""

    family: Literal["kolibri1"] = "kolibri1"
    shape: Kolibri1Shape
    renormalise: bool = False
    """Whether the chosen experts' sigmoids are divided by their sum."""
    balance: Balance = (Bias(rate=hf.BIAS_RATE),)
    rope: Rope = Rope()

    architecture = "Kolibri1ForCausalLM"
    attention_fixed = {"qk_norm": "head"}
    block_fixed = {"norms": "both"}
    router_fixed = {"score": "sigmoid", "order": "topk_first", "selection_bias": True}
    router_fields = ("renormalise",)
    hf_sizes = names.gqa_sizes(
        "num_local_experts", "moe_intermediate_size", shared_expert_intermediate_size="shared_width"
    )
    renamed_fields = {"num_local_experts": "num_experts"}
    fields = (
        *hf.head_fields(128),
        hf.BiasBalance(),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, False),
        WindowKinds(lambda config, layer: (layer + 1) % 5 == 0, refuse_unused=True),
        hf.Ignored(("use_sliding_window", "head_dtype")),  # of released folders
        hf.NULL_TOKENS,
    )
    tensors = names.renamed(
        (
            *names.llama_names(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
            *names.gqa_names(qk_norm=True),
            *names.expert_names(),
            *names.bias_names("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
            *names.shared_names(),
        ),
        _NORMS,
    )
