"""Qwen3-MoE (arXiv 2505.09388): norms per query and key head, optional dense layers."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import DenseSteps
from moefold.model.families.names import expert_names, gqa_names, gqa_sizes, llama_names
from moefold.model.families.sizes import DenseListed, FreeGqaSizes
from moefold.moe.config import Aux


class Qwen3MoeShape(FreeGqaSizes, DenseListed):
    """Sizes of a Qwen3-MoE."""


@MODEL.register
class Qwen3Moe(Family):
    """A Qwen3-MoE."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    shape: Qwen3MoeShape
    renormalise: bool = True
    """Whether the chosen probabilities are divided by their sum, as in the released models."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(theta=1e6)

    architecture = "Qwen3MoeForCausalLM"
    hf_sizes = gqa_sizes("num_local_experts", "moe_intermediate_size")
    renamed_fields = {"num_local_experts": "num_experts"}
    attention_fixed = {"qk_norm": "head"}
    router_fields = ("renormalise",)
    fields = (
        *hf.head_fields(),
        hf.AuxLossField(),
        DenseSteps(),
        hf.DenseWidthField(),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, False),
        *hf.fixed(use_sliding_window=False, qkv_bias=False),
        hf.Fixed("shared_expert_intermediate_size", 0, (None,)),
        hf.Fixed("use_qk_norm", True),
        hf.Ignored(("sliding_window", "max_window_layers")),  # used only with a sliding window
    )
    tensors = (*llama_names(), *gqa_names(qk_norm=True), *expert_names())
