"""ERNIE 4.5: softmax with a selection bias, weights divided by their sum or its lower bound."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import ExpertLayers
from moefold.model.families.sizes import AnySharedSizes, DenseListed, GqaSizes
from moefold.moe.config import Aux, Bias

_THETA = 5e5


class Ernie45MoeShape(GqaSizes, AnySharedSizes, DenseListed):
    """Sizes of an ERNIE 4.5."""


@MODEL.register
class Ernie45Moe(Family):
    """An ERNIE 4.5."""

    family: Literal["ernie4_5_moe"] = "ernie4_5_moe"
    shape: Ernie45MoeShape
    floor: Annotated[float, Field(ge=0)] = 1e-12
    """Lower bound of the sum by which the chosen probabilities are divided."""
    balance: Balance = (Bias(rate=hf.BIAS_RATE), Aux(coefficient=hf.AUX_COEFFICIENT))
    rope: Rope = Rope(theta=_THETA, layout="interleaved")
    norm_epsilon: Positive = 1e-5
    tied: bool = True

    architecture = "Ernie4_5_MoeForCausalLM"
    field_defaults = {"tie_word_embeddings": True}
    fixed_rope = "interleaved"
    router_fixed = {"selection_bias": True}
    router_fields = ("floor",)
    hf_sizes = names.gqa_sizes("moe_num_experts", "moe_intermediate_size", "moe_k")
    fields = (
        hf.KvHeads(),
        hf.Derived("head_dim", lambda model: model.shape.resolved_head_dim),
        hf.Rotary(_THETA, "interleaved"),
        hf.AuxLossField(with_bias=True),
        hf.SharedExpertCount("moe_num_shared_experts", optional=True),
        hf.DenseWidthField(),
        ExpertLayers(),
        hf.FieldValue("moe_norm_min", "floor", float, 1e-12),
        hf.Fixed("use_bias", False, (None,)),
        *hf.fixed(use_rmsnorm=True, moe_gate="topk", moe_use_aux_free=True),
        hf.Ignored(("moe_capacity", "num_nextn_predict_layers")),
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.expert_names(),
        *names.bias_names(
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias",
            unit_dims=(1, 0),
        ),
        *names.shared_names(),
    )
