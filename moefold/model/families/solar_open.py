"""Solar Open: grouped-query attention without norms, DeepSeek-V3's router, a shared expert."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families.fields import (
    BiasBalance,
    FieldValue,
    HeadDim,
    KvHeads,
    Only,
    Rotary,
    SharedNumber,
    Unread,
)
from moefold.model.families.names import (
    ROUTED_SIZES,
    bias_names,
    expert_names,
    gqa_names,
    llama_names,
    shared_names,
)
from moefold.model.families.sigmoid import ROUTER_FIELDS, SigmoidFamily
from moefold.model.families.sizes import FreeGqaSizes, SharedSizes

_THETA = 1e6


class SolarOpenShape(FreeGqaSizes, SharedSizes):
    """Sizes of a Solar Open."""


@MODEL.register
class SolarOpen(SigmoidFamily):
    """A Solar Open."""

    family: Literal["solar_open"] = "solar_open"
    shape: SolarOpenShape
    scale: Annotated[float, Field(gt=0)] = 1.0
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5

    model_type = "solar_open"
    architecture = "SolarOpenForCausalLM"
    hf_sizes = ROUTED_SIZES
    fields = (
        *ROUTER_FIELDS,
        KvHeads(),
        HeadDim(128),
        Rotary(_THETA),
        BiasBalance(),
        SharedNumber(),
        FieldValue("routed_scaling_factor", "scale", float, 1.0),
        Only("first_k_dense_replace", 0),
        Only("use_qk_norm", False),
        Unread(("intermediate_size",)),  # of dense layers, of which there are none
    )
    tensors = (*llama_names(), *gqa_names(), *expert_names(), *bias_names(), *shared_names())
