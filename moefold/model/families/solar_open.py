"""Solar Open: grouped-query attention without norms, DeepSeek-V3's router, a shared expert."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.sizes import FreeGqaSizes, SharedSizes

_THETA = 1e6


class SolarOpenShape(FreeGqaSizes, SharedSizes):
    """Sizes of a Solar Open."""


@MODEL.register
class SolarOpen(SigmoidFamily):
    """A Solar Open."""

    family: Literal["solar_open"] = "solar_open"
    shape: SolarOpenShape
    scale: Positive = 1.0
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5

    architecture = "SolarOpenForCausalLM"
    hf_sizes = names.gqa_sizes("n_routed_experts", "moe_intermediate_size")
    fields = (
        *hf.ROUTER_FIELDS,
        *hf.head_fields(128, _THETA),
        hf.BiasBalance(),
        hf.SharedExpertCount(),
        hf.FieldValue("routed_scaling_factor", "scale", float, 1.0),
        *hf.fixed(first_k_dense_replace=0, use_qk_norm=False),
        hf.Ignored(("intermediate_size",)),  # of dense layers, of which there are none
    )
    tensors = (*names.deepseek_names(), *names.gqa_names())
