"""GLM-4.5 (arXiv 2508.06471): half of a head is rotated, optional biases and norms per head."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.sizes import DenseFirst, FreeGqaSizes, SharedSizes


class Glm4MoeShape(FreeGqaSizes, SharedSizes, DenseFirst):
    """Sizes of a GLM-4.5."""


@MODEL.register
class Glm4Moe(SigmoidFamily):
    """A GLM-4.5."""

    family: Literal["glm4_moe"] = "glm4_moe"
    shape: Glm4MoeShape
    scale: Positive = 1.0
    bias: Literal["none", "qkv"] = "none"
    """Whether queries, keys and values have biases."""
    qk_norm: Literal["none", "head"] = "none"
    """Whether queries and keys are normed per head."""
    rope: Rope = Rope(fraction=0.5)
    norm_epsilon: Positive = 1e-5

    architecture = "Glm4MoeForCausalLM"
    extra_layers = "layers for multi-token prediction"
    attention_fields = ("bias", "qk_norm")
    hf_sizes = names.gqa_sizes(
        "n_routed_experts", "moe_intermediate_size", first_k_dense_replace="dense_layers"
    )
    fields = (
        *hf.deepseek_fields(1.0),
        *hf.head_fields(None, 1e4, fraction=0.5),
        hf.bias_field("attention_bias", False),
        hf.qk_norm_field("use_qk_norm"),
        hf.MULTI_TOKEN,
    )
    tensors = (
        *names.deepseek_names(),
        *names.gqa_names(qk_norm=True),
        *names.projection_bias_names(),
    )
