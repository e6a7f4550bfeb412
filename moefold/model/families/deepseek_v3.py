"""DeepSeek-V3 (arXiv 2412.19437): latent attention, sigmoid router in groups, a shared expert.

The two norms on latents have an epsilon of 1e-6 independent of ``rms_norm_eps``, as in
transformers, which leaves out multi-token prediction blocks. Kimi-K2 has this architecture.
"""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL, MultiToken
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance
from moefold.model.families.sigmoid import LATENT_SIZES, MultiTokenFamily
from moefold.model.families.sizes import DenseFirst, LatentSizes, SharedSizes
from moefold.moe.config import Aux, Bias

_ALPHA = 1e-4


class DeepseekV3Shape(LatentSizes, SharedSizes, DenseFirst):
    """Sizes of a DeepSeek-V3."""


@MODEL.register
class DeepseekV3(MultiTokenFamily):
    """A DeepSeek-V3, by default with the balance and scale of its report."""

    family: Literal["deepseek_v3"] = "deepseek_v3"
    shape: DeepseekV3Shape
    balance: Balance = (Bias(rate=hf.BIAS_RATE), Aux(over="sequence", coefficient=_ALPHA))
    rope: Rope = Rope(layout="interleaved")

    aliases = ("kimi_k2",)
    architecture = "DeepseekV3ForCausalLM"
    field_defaults = {"n_group": 8, "topk_group": 4}
    fixed_rope = None
    scales_softmax = True
    extra_layers = "layers for multi-token prediction"
    hf_sizes = LATENT_SIZES | {"first_k_dense_replace": "dense_layers"}
    fields = (
        *hf.LATENT_FIELDS,
        *hf.ROUTER_FIELDS,
        hf.Rotary(1e4, "interleaved", "rope_interleave", scales_softmax=True),
        hf.SequenceBalance(_ALPHA),
        hf.SharedExpertCount(),
        hf.DenseWidthField(),
        hf.FieldValue("routed_scaling_factor", "scale", float, 2.5),
        *hf.fixed(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
        # No field states the weights of the further tokens' losses.
        hf.FieldValue(
            "num_nextn_predict_layers", "multi_token", int, 0, lambda n: (MultiToken(),) * n, len
        ),
        hf.Ignored(("num_mtp_layers",)),
    )
    tensors = (
        *names.deepseek_names(),
        *names.latent_names(),
        *names.layer_names(  # of multi-token blocks
            {
                "embed_norm.weight": "enorm.weight",
                "row_norm.weight": "hnorm.weight",
                "join.weight": "eh_proj.weight",
                "norm.weight": "shared_head.norm.weight",
            }
        ),
    )
