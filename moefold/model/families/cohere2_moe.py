"""Command A+ (Cohere2-MoE): parallel sublayers with one norm, windows, scaled logits."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import DENSE_ROPE, DenseKinds, WindowKinds, prefix_full
from moefold.model.families.sizes import DenseRopeSizes
from moefold.model.families.special_fields import ExpertSelection, NormKind, SharedCombination


def _inverse(value: float) -> float:
    return 1 / value if value else value  # the record's rules refuse 0


@MODEL.register
class Cohere2Moe(Family):
    """A Cohere2-MoE."""

    family: Literal["cohere2_moe"] = "cohere2_moe"
    shape: DenseRopeSizes
    norm: Literal["rms", "layer"] = "layer"
    """Kind of the norms of residual rows."""
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    weights: Literal["softmax", "sigmoid", "shares"] = "softmax"
    """Weights of the chosen experts: softmax over them, sigmoids, or sigmoids over their sum."""
    scale: Positive = 1.0
    """Factor on the sum of all experts' outputs: 0.5 is the mean of routed and shared."""
    logits_divisor: Positive = 16.0
    """Divisor of the logits."""
    balance: Balance = ()
    rope: Rope = Rope(layout="interleaved")
    norm_epsilon: Positive = 1e-5

    architecture = "Cohere2MoeForCausalLM"
    field_defaults = {"tie_word_embeddings": True}
    epsilon_field = "layer_norm_eps"
    fixed_rope = "interleaved"
    attention_fields = ("bias",)
    moe_fields = ("scale",)
    block_fixed = {"norms": "shared"}
    decoder_fields = ("norm", "logits_divisor")
    router_kinds = {
        "softmax": {"score": "softmax", "order": "topk_first"},
        "sigmoid": {"score": "sigmoid", "renormalise": False},
        "shares": {"score": "sigmoid", "renormalise": True},
    }
    hf_sizes = names.gqa_sizes("num_experts", "intermediate_size")
    fields = (
        *hf.head_fields(128, 1e4, "interleaved"),
        NormKind(),
        hf.SharedExpertCount("num_shared_experts", True, "intermediate_size"),
        SharedCombination(),
        DenseKinds(0, "first_k_dense_replace"),
        hf.DenseWidthField("prefix_dense_intermediate_size", "intermediate_size"),
        DENSE_ROPE,
        WindowKinds(prefix_full, refuse_unused=True),
        ExpertSelection(),
        hf.bias_field("attention_bias", False, "all"),
        *hf.fixed(use_parallel_block=True, use_qk_norm=False),
        hf.FieldValue("logit_scale", "logits_divisor", float, 0.0625, _inverse, _inverse),
        hf.Ignored(("first_k_dense_replace", "sliding_window_pattern")),  # read for kinds of layers
        hf.NULL_TOKENS,
    )
    tensors = (
        *names.llama_names("input_layernorm", "", "", ""),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        *names.expert_names(),
        *names.shared_names(),
    )
