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
_MOE, _AT = "layers.{i}.moe", "model.layers.{i}.feed_forward"


@MODEL.register
class Llama4Text(Family):
    """The text model of a Llama 4."""

    family: Literal["llama4_text"] = "llama4_text"
    shape: ChunkedSizes
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    balance: Balance = (Aux(coefficient=hf.AUX),)
    rope: Rope = Rope(theta=_THETA, layout="interleaved")
    norm_epsilon: Positive = 1e-5

    architecture = "Llama4ForCausalLM"
    fixed_rope = "interleaved"
    attention_fields = ("bias",)
    router_own = {"score": "sigmoid", "renormalise": False}
    moe_own = {"weigh": "input"}
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *hf.heads(128, _THETA, "interleaved"),
        hf.AuxField(),
        hf.DenseSize("intermediate_size_mlp"),
        hf.projection_bias("attention_bias", False, "all"),
        ChunkKinds(),
        ExpertList(),
    )
    tensors = (
        *names.llama_names(mlp="feed_forward"),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        names.entry(f"{_MOE}.router.weight", f"{_AT}.router.weight"),
        # Experts' matrices are [in, out], gates before ups.
        names.Entry(f"{_MOE}.experts.w_in", (f"{_AT}.experts.gate_up_proj",), order=(0, 3, 1, 2)),
        names.Entry(f"{_MOE}.experts.w_out", (f"{_AT}.experts.down_proj",), order=(0, 2, 1)),
        names.entry(
            f"{_MOE}.shared.w_in",
            f"{_AT}.shared_expert.gate_proj.weight",
            f"{_AT}.shared_expert.up_proj.weight",
        ),
        names.entry(f"{_MOE}.shared.w_out", f"{_AT}.shared_expert.down_proj.weight"),
    )
