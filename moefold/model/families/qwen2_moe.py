"""Qwen2-MoE (arXiv 2407.10671): query, key and value biases, a gated shared expert."""

from typing import Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.hub import ConfigReader
from moefold.model.families.layer_kinds import DenseSteps, WindowKinds, WindowSwitch
from moefold.model.families.sizes import AlwaysSharedSizes, DenseListed, WindowSizes
from moefold.moe.config import Aux


def _full(config: ConfigReader, layer: int) -> bool:
    used = config.get("use_sliding_window", bool, False)
    return layer % 2 == 1 or layer >= config.get("max_window_layers", int, 28) or not used


class Qwen2MoeShape(WindowSizes, AlwaysSharedSizes, DenseListed):
    """Sizes of a Qwen2-MoE."""


@MODEL.register
class Qwen2Moe(Family):
    """A Qwen2-MoE."""

    family: Literal["qwen2_moe"] = "qwen2_moe"
    shape: Qwen2MoeShape
    renormalise: bool = False
    """Whether the chosen probabilities are divided by their sum."""
    bias: Literal["none", "qkv"] = "qkv"
    """Whether queries, keys and values have biases."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(theta=1e6)

    architecture = "Qwen2MoeForCausalLM"
    shared_gate = True
    attention_fields = ("bias",)
    router_fields = ("renormalise",)
    hf_sizes = names.gqa_sizes(
        "num_experts", "moe_intermediate_size", shared_expert_intermediate_size="shared_width"
    )
    fields = (
        *hf.head_fields(),
        hf.AuxLossField(),
        DenseSteps(),
        hf.DenseWidthField(),
        WindowKinds(_full),
        WindowSwitch(),
        hf.bias_field("qkv_bias", True),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, False),
    )
    tensors = (*names.qwen_names(), *names.gqa_names(), *names.projection_bias_names())
