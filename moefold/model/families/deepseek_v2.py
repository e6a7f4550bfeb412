"""DeepSeek-V2 (arXiv 2405.04434): latent attention, group-limited routing by softmax."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families.base import Balance, Family
from moefold.model.families.names import expert_names, latent_names, llama_names, shared_names
from moefold.model.families.sigmoid import LATENT_SIZES
from moefold.model.families.sizes import DenseFirst, LatentSizes, SharedSizes
from moefold.moe.config import Aux, Groups

_ALPHA = 1e-3  # of released folders


class DeepseekV2Shape(LatentSizes, SharedSizes, DenseFirst):
    """Sizes of a DeepSeek-V2."""


@MODEL.register
class DeepseekV2(Family):
    """A DeepSeek-V2; routing weights are never renormalised."""

    family: Literal["deepseek_v2"] = "deepseek_v2"
    shape: DeepseekV2Shape
    scale: Positive = 1.0
    """Factor on the weights of routed experts."""
    groups: Groups | None = None
    """Group-limited routing; a group's score is its best expert's."""
    balance: Balance = (Aux(over="sequence", coefficient=_ALPHA),)
    rope: Rope = Rope(layout="interleaved")

    architecture = "DeepseekV2ForCausalLM"
    fixed_rope = "interleaved"
    scales_softmax = True
    router_fixed = {"renormalise": False}
    router_fields = ("scale", "groups")
    hf_sizes = LATENT_SIZES | {"first_k_dense_replace": "dense_layers"}
    fields = (
        *hf.LATENT_FIELDS,
        hf.Rotary(1e4, "interleaved", scales_softmax=True),
        hf.SequenceBalance(_ALPHA, with_bias=False),
        hf.SharedExpertCount(),
        hf.DenseWidthField(),
        hf.TopkMethod(),
        hf.FieldValue("routed_scaling_factor", "scale", float, 1.0),
        hf.Fixed("norm_topk_prob", False, (None,)),
        *hf.fixed(scoring_func="softmax", moe_layer_freq=1),
    )
    tensors = (*llama_names(), *latent_names(), *expert_names(), *shared_names())
