"""gpt-oss (arXiv 2508.10925): sinks, windows in alternate layers, biases, a clamped gate."""

from typing import Literal

from moefold.layers.config import Activation, Positive, Rope
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.layer_kinds import WindowKinds
from moefold.model.families.own_fields import Swish
from moefold.model.families.sizes import SinkSizes
from moefold.moe.config import Aux

_THETA = 150000.0
_MOE, _AT = "layers.{i}.moe", "model.layers.{i}.mlp"
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
    balance: Balance = (Aux(coefficient=hf.AUX),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Positive = 1e-5

    architecture = "GptOssForCausalLM"
    router_own = {"order": "topk_first", "bias": True}
    moe_own = {"expert_bias": True}
    moe_fields = ("activation",)
    attention_fields = ("bias",)
    hf_sizes = names.gqa_sizes("num_local_experts", "intermediate_size")
    fields = (
        *hf.heads(64, _THETA, unstated=_YARN),
        hf.AuxField(),
        hf.projection_bias("attention_bias", True, "all"),
        Swish(),
        WindowKinds(lambda config, layer: layer % 2 == 1, idle=128),
        hf.Follows("experts_per_token", lambda model: model.shape.top_k),
        hf.Unread(("initial_context_length",)),  # also a field of YaRN
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.projection_bias_names("qkvo"),
        names.entry("layers.{i}.attention.sinks", "model.layers.{i}.self_attn.sinks"),
        names.entry(f"{_MOE}.router.weight", f"{_AT}.router.weight"),
        names.entry(f"{_MOE}.router.bias", f"{_AT}.router.bias"),
        # Experts' matrices are [in, out], with gate and up interleaved.
        names.Entry(f"{_MOE}.experts.w_in", (f"{_AT}.experts.gate_up_proj",), order=(0, 3, 2, 1)),
        names.Entry(f"{_MOE}.experts.w_out", (f"{_AT}.experts.down_proj",), order=(0, 2, 1)),
        names.Entry(
            f"{_MOE}.experts.in_bias", (f"{_AT}.experts.gate_up_proj_bias",), order=(0, 2, 1)
        ),
        names.entry(f"{_MOE}.experts.out_bias", f"{_AT}.experts.down_proj_bias"),
    )
