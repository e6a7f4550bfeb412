"""OLMoE (arXiv 2409.02060): q/k norms over whole projections, weights not renormalised."""

from typing import Literal

from moefold.layers.config import Positive
from moefold.model.config import MODEL
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import AuxLossField, Derived, FieldValue, KvHeads, Rotary, fixed
from moefold.model.families.names import expert_names, gqa_names, gqa_sizes, llama_names
from moefold.model.families.sizes import GqaSizes
from moefold.moe.config import Aux, Z

_AUX = 1e-2  # the default of transformers' class, and the coefficient of the report


@MODEL.register
class Olmoe(Family):
    """An OLMoE, by default also with the z-loss of its report."""

    family: Literal["olmoe"] = "olmoe"
    shape: GqaSizes
    renormalise: bool = False
    """Whether the chosen probabilities are divided by their sum."""
    balance: Balance = (Aux(coefficient=_AUX), Z(coefficient=1e-3))
    norm_epsilon: Positive = 1e-5

    architecture = "OlmoeForCausalLM"
    hf_sizes = gqa_sizes("num_experts", "intermediate_size")
    attention_fixed = {"qk_norm": "projection"}
    router_fields = ("renormalise",)
    fields = (
        KvHeads(),
        Rotary(1e4),
        AuxLossField(_AUX),
        FieldValue("norm_topk_prob", "renormalise", bool, False),
        *fixed(clip_qkv=None, sliding_window=None),
        Derived("head_dim", lambda model: model.shape.resolved_head_dim),
    )
    tensors = (*llama_names(), *gqa_names(qk_norm=True), *expert_names())
