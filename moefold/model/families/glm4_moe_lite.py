"""GLM-4.7-Flash: DeepSeek-V3's attention and router, with a list of dense layers."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.layer_kinds import DenseKinds
from moefold.model.families.sigmoid import LATENT_SIZES, SigmoidFamily
from moefold.model.families.sizes import DenseListed, LatentSizes, SharedSizes


class Glm4MoeLiteShape(LatentSizes, SharedSizes, DenseListed):
    """Sizes of a GLM-4.7-Flash."""


@MODEL.register
class Glm4MoeLite(SigmoidFamily):
    """A GLM-4.7-Flash."""

    family: Literal["glm4_moe_lite"] = "glm4_moe_lite"
    shape: Glm4MoeLiteShape
    scale: Positive = 1.8
    rope: Rope = Rope(layout="interleaved")
    norm_epsilon: Positive = 1e-5

    architecture = "Glm4MoeLiteForCausalLM"
    fixed_rope = None
    scales_softmax = True
    extra_layers = "layers for multi-token prediction"
    hf_sizes = LATENT_SIZES
    fields = (
        *hf.LATENT_FIELDS,
        *hf.deepseek_fields(1.8),
        hf.Rotary(1e4, "interleaved", "rope_interleave", scales_softmax=True),
        DenseKinds(),
        hf.Derived("first_k_dense_replace", lambda model: len(model.shape.dense)),
        hf.MULTI_TOKEN,
    )
    tensors = (*names.deepseek_names(), *names.latent_names())
