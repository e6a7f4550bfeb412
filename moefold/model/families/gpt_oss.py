"""gpt-oss (arXiv 2508.10925): sinks, windows in alternate layers, biases, a clamped gate."""

from typing import Literal

from moefold.layers.config import Activation, Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import WindowKinds
from moefold.model.families.sizes import SinkSizes
from moefold.model.families.special_fields import SwigluFields
from moefold.moe.config import Aux

_THETA = 150000.0
_MOE = "layers.{i}.moe"
_HF = "model.layers.{i}.mlp"
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@MODEL.register
class GptOss(Family):
    """A gpt-oss."""

    family: Literal["gpt_oss"] = "gpt_oss"
    shape: SinkSizes
    bias: Literal["none", "all"] = "all"
    """Whether projections of attention have biases."""
    activation: Activation = Activation(alpha=1.702, limit=7.0, offset=1.0)
    """Activation of the experts."""
    balance: Balance = (Aux(coefficient=hf.AUX_COEFFICIENT),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5

    architecture = "GptOssForCausalLM"
    router_fixed = {"order": "topk_first", "bias": True}
    moe_fixed = {"expert_bias": True}
    moe_fields = ("activation",)
    attention_fields = ("bias",)
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *hf.head_fields(64, _THETA, default_parameters=_YARN),
        hf.AuxLossField(),
        hf.bias_field("attention_bias", True, "all"),
        SwigluFields(),
        WindowKinds(lambda config, layer: layer % 2 == 1, unused_window=128),
        hf.Derived("experts_per_token", lambda model: model.shape.top_k),
        hf.Ignored(("initial_context_length",)),  # also a field of YaRN
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        names.param("layers.{i}.attention.sinks", "model.layers.{i}.self_attn.sinks"),
        names.param(f"{_MOE}.router.weight", f"{_HF}.router.weight"),
        names.param(f"{_MOE}.router.bias", f"{_HF}.router.bias"),
        # Experts' matrices are [in, out], with gate and up interleaved.
        names.ParamMapping(
            f"{_MOE}.experts.w_in", (f"{_HF}.experts.gate_up_proj",), perm=(0, 3, 2, 1)
        ),
        names.ParamMapping(f"{_MOE}.experts.w_out", (f"{_HF}.experts.down_proj",), perm=(0, 2, 1)),
        names.ParamMapping(
            f"{_MOE}.experts.in_bias", (f"{_HF}.experts.gate_up_proj_bias",), perm=(0, 2, 1)
        ),
        names.param(f"{_MOE}.experts.out_bias", f"{_HF}.experts.down_proj_bias"),
    )
