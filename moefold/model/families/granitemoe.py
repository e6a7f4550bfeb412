"""Granite MoE: four scalar factors, softmax over the chosen experts, gate and up in one tensor."""

from typing import Literal

from moefold.layers.config import Positive
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.sizes import GqaSizes
from moefold.moe.config import Aux

_MOE = "layers.{i}.moe"
_HF = "model.layers.{i}.block_sparse_moe"
_SHARED = "model.layers.{i}.shared_mlp"


@MODEL.register
class Granitemoe(Family):
    """A Granite MoE."""

    family: Literal["granitemoe"] = "granitemoe"
    shape: GqaSizes
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    scale: Positive = 1.0
    """Factor on attention scores."""
    residual_scale: Positive = 1.0
    """Factor on the output of each sublayer of a block."""
    embed_scale: Positive = 1.0
    """Factor on the embedded rows."""
    logits_divisor: Positive = 1.0
    """Divisor of the logits."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)

    architecture = "GraniteMoeForCausalLM"
    router_fixed = {"order": "topk_first"}
    attention_fields = ("bias", "scale")
    block_fields = ("residual_scale",)
    decoder_fields = ("embed_scale", "logits_divisor")
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        hf.KvHeads(),
        hf.Derived("head_dim", lambda model: model.shape.resolved_head_dim),
        hf.Rotary(1e4),
        hf.AuxLossField(),
        hf.bias_field("attention_bias", False, "all"),
        hf.FieldValue("attention_multiplier", "scale", float, 1.0),
        hf.FieldValue("residual_multiplier", "residual_scale", float, 1.0),
        hf.FieldValue("embedding_multiplier", "embed_scale", float, 1.0),
        hf.FieldValue("logits_scaling", "logits_divisor", float, 1.0),
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        names.param(
            f"{_MOE}.router.weight",
            f"{_HF}.router.layer.weight",
            packed=f"{_HF}.router.weight",
        ),
        names.ParamMapping(
            f"{_MOE}.experts.w_in",
            (f"{_HF}.input_linear.weight",),
            (f"{_HF}.experts.gate_up_proj",),
            fused=True,
        ),
        names.param(
            f"{_MOE}.experts.w_out",
            f"{_HF}.output_linear.weight",
            packed=f"{_HF}.experts.down_proj",
        ),
        names.ParamMapping(f"{_MOE}.shared.w_in", (f"{_SHARED}.input_linear.weight",), fused=True),
        names.param(f"{_MOE}.shared.w_out", f"{_SHARED}.output_linear.weight"),
    )
