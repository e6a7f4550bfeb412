"""Qwen3.5-MoE's text model: Qwen3-Next with separate projections and without dense layers."""

from typing import Any, ClassVar, Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.mixed_sizes import DeltaSizes
from moefold.model.families.qwen2_moe import Qwen2Moe
from moefold.model.families.qwen3_next import ATTENTION, FIELDS
from moefold.model.families.sizes import AlwaysSharedSizes
from moefold.moe.config import Aux


class Qwen35MoeShape(DeltaSizes, AlwaysSharedSizes):
    """Sizes of a Qwen3.5-MoE."""


@MODEL.register
class Qwen35Moe(Family):
    """A Qwen3.5-MoE."""

    family: Literal["qwen3_5_moe_text"] = "qwen3_5_moe_text"
    shape: Qwen35MoeShape
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(fraction=0.25)

    architecture = "Qwen3_5MoeForCausalLM"
    shared_gate = True
    attention_fixed: ClassVar[dict[str, Any]] = ATTENTION
    decoder_fixed: ClassVar[dict[str, Any]] = {"norm": "zero_centred"}
    hf_sizes = Qwen2Moe.hf_sizes
    fields = (
        *FIELDS,
        *hf.fixed(attn_output_gate=True, mlp_only_layers=[]),
        hf.Ignored(("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
    )
    tensors = (
        *names.qwen_names(),
        *names.qwen_delta_names(),
        *names.joined_params(
            "linear_attn.in_proj_qkv.weight", *(f"{part}_in.weight" for part in ("q", "k", "v"))
        ),
        *names.layer_names(
            {
                f"{ours}_in.weight": f"in_proj_{theirs}.weight"
                for ours, theirs in (("gate", "z"), ("beta", "b"), ("decay", "a"))
            },
            "attention.",
            "linear_attn.",
        ),
    )
