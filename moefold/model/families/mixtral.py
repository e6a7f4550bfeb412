"""Mixtral (arXiv 2401.04088): grouped-query attention, weights always renormalised."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import AUX_COEFFICIENT, AuxLossField, Fixed, head_fields
from moefold.model.families.names import gqa_names, gqa_sizes, llama_names, w123_names
from moefold.model.families.sizes import FreeGqaSizes
from moefold.moe.config import Aux

_THETA = 1e6


@MODEL.register
class Mixtral(Family):
    """A Mixtral."""

    family: Literal["mixtral"] = "mixtral"
    shape: FreeGqaSizes
    balance: Balance = (Aux(coefficient=AUX_COEFFICIENT),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5

    architecture = "MixtralForCausalLM"
    hf_sizes = gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *head_fields(None, _THETA),
        AuxLossField(),
        Fixed("sliding_window", None),
        Fixed("router_jitter_noise", 0.0, (0, None)),
    )
    tensors = (*llama_names(), *gqa_names(), *w123_names())
