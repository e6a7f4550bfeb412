"""GLM-4.5 (arXiv 2508.06471): half of a head turns, biases and norms on heads where asked."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families.fields import (
    BiasBalance,
    DenseSize,
    FieldValue,
    HeadDim,
    HeadNorm,
    KvHeads,
    ProjectionBias,
    Rotary,
    SharedNumber,
)
from moefold.model.families.names import (
    ROUTED_SIZES,
    bias_names,
    expert_names,
    gqa_names,
    llama_names,
    projection_bias_names,
    shared_names,
)
from moefold.model.families.sigmoid import MULTI_TOKEN, ROUTER_FIELDS, SigmoidFamily
from moefold.model.families.sizes import DenseFirst, FreeGqaSizes, SharedSizes


class Glm4MoeShape(FreeGqaSizes, SharedSizes, DenseFirst):
    """Sizes of a GLM-4.5."""


@MODEL.register
class Glm4Moe(SigmoidFamily):
    """A GLM-4.5."""

    family: Literal["glm4_moe"] = "glm4_moe"
    shape: Glm4MoeShape
    scale: Annotated[float, Field(gt=0)] = 1.0
    bias: Literal["none", "qkv"] = "none"
    """Whether queries, keys and values have biases."""
    qk_norm: Literal["none", "head"] = "none"
    """Whether each head of queries and keys has a norm."""
    rope: Rope = Rope(fraction=0.5)
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    extra_layers = "layers for multi-token prediction"
    attention_fields = ("bias", "qk_norm")
    hf_sizes = ROUTED_SIZES | {"first_k_dense_replace": "dense_layers"}
    fields = (
        *ROUTER_FIELDS,
        KvHeads(),
        HeadDim(),
        Rotary(1e4, fraction=0.5),
        BiasBalance(),
        SharedNumber(),
        DenseSize(),
        ProjectionBias("attention_bias", False),
        HeadNorm("use_qk_norm"),
        FieldValue("routed_scaling_factor", "scale", float, 1.0),
        MULTI_TOKEN,
    )
    tensors = (
        *llama_names(),
        *gqa_names(qk_norm=True),
        *projection_bias_names(),
        *expert_names(),
        *bias_names(),
        *shared_names(),
    )
