"""Llama 4's text model: chunks, layers without positions, weights on the experts' inputs."""

from typing import Literal

from moefold.layers.config import Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import ChunkKinds, ExpertList
from moefold.model.families.mixed_sizes import ChunkedSizes
from moefold.moe.config import Aux

_THETA = 5e5
_MOE = "layers.{i}.moe"
_HF = "model.layers.{i}.feed_forward"


@MODEL.register
class Llama4Text(Family):
    """The text model of a Llama 4."""

    family: Literal["llama4_text"] = "llama4_text"
    shape: ChunkedSizes
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(theta=_THETA, layout="interleaved")
    norm_epsilon: Positive = 1e-5

    architecture = "Llama4ForCausalLM"
    fixed_rope = "interleaved"
    attention_fields = ("bias",)
    router_fixed = {"score": "sigmoid", "renormalise": False}
    moe_fixed = {"weigh": "input"}
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *hf.head_fields(128, _THETA, "interleaved"),
        hf.AuxLossField(),
        hf.DenseWidthField("intermediate_size_mlp"),
        hf.bias_field("attention_bias", False, "all"),
        ChunkKinds(),
        ExpertList(),
    )
    tensors = (
        *names.llama_names(mlp="feed_forward"),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        names.param(f"{_MOE}.router.weight", f"{_HF}.router.weight"),
        # Experts' matrices are [in, out], gates before ups.
        names.ParamMapping(
            f"{_MOE}.experts.w_in", (f"{_HF}.experts.gate_up_proj",), perm=(0, 3, 1, 2)
        ),
        names.ParamMapping(f"{_MOE}.experts.w_out", (f"{_HF}.experts.down_proj",), perm=(0, 2, 1)),
        names.param(
            f"{_MOE}.shared.w_in",
            f"{_HF}.shared_expert.gate_proj.weight",
            f"{_HF}.shared_expert.up_proj.weight",
        ),
        names.param(f"{_MOE}.shared.w_out", f"{_HF}.shared_expert.down_proj.weight"),
    )
