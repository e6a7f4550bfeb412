"""Qwen3-Next: gated delta nets and gated attention, zero-centred norms."""

from typing import Any, ClassVar, Literal

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import DenseSteps, MixerKinds, RecordSizes, every_nth_full
from moefold.model.families.mixed_sizes import DeltaSizes
from moefold.model.families.qwen2_moe import Qwen2Moe
from moefold.model.families.sizes import AlwaysSharedSizes, DenseListed
from moefold.moe.config import Aux

LINEAR = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
FIELDS = (
    *hf.head_fields(256, 1e4, fraction=0.25),
    hf.AuxLossField(),
    RecordSizes(LINEAR),
    MixerKinds("linear_attention", every_nth_full("full_attention_interval")),
    hf.Ignored(("full_attention_interval",)),  # read by ConvolvedKinds
)
ATTENTION: dict[str, Any] = {"qk_norm": "zero_centred", "gate": True}


class Qwen3NextShape(DeltaSizes, AlwaysSharedSizes, DenseListed):
    """Sizes of a Qwen3-Next."""


@MODEL.register
class Qwen3Next(Family):
    """A Qwen3-Next."""

    family: Literal["qwen3_next"] = "qwen3_next"
    shape: Qwen3NextShape
    renormalise: bool = True
    """Whether the chosen probabilities are divided by their sum."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(fraction=0.25)

    architecture = "Qwen3NextForCausalLM"
    shared_gate = True
    attention_fixed: ClassVar[dict[str, Any]] = ATTENTION
    decoder_fixed: ClassVar[dict[str, Any]] = {"norm": "zero_centred"}
    router_fields = ("renormalise",)
    hf_sizes = Qwen2Moe.hf_sizes
    fields = (
        *FIELDS,
        DenseSteps(),
        hf.DenseWidthField(),
        hf.FieldValue("norm_topk_prob", "renormalise", bool, True),
        hf.Fixed("use_sliding_window", False),
    )
    tensors = (
        *names.qwen_names(),
        *names.qwen_delta_names(),
        *names.joined_params(
            "linear_attn.in_proj_qkvz.weight",
            *(f"{part}_in.weight" for part in ("q", "k", "v", "gate")),
            grouped=True,
        ),
        *names.joined_params(
            "linear_attn.in_proj_ba.weight", "beta_in.weight", "decay_in.weight", grouped=True
        ),
    )
