"""Hunyuan-Large family (arXiv 2411.02265): norms per head after rotation, one shared expert."""

from typing import Literal

from moefold.layers.config import Positive
from moefold.model.config import MODEL
from moefold.model.families import names
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import Ignored, bias_field, head_fields
from moefold.model.families.sizes import FreeGqaSizes


class HunyuanV1MoeShape(FreeGqaSizes):
    """Sizes of a Hunyuan."""

    @property
    def resolved_shared_width(self) -> int:
        """``expert_width``: the shared expert is as wide as a routed expert."""
        return self.expert_width


@MODEL.register
class HunyuanV1Moe(Family):
    """A Hunyuan; routing weights are always renormalised."""

    family: Literal["hunyuan_v1_moe"] = "hunyuan_v1_moe"
    shape: HunyuanV1MoeShape
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    balance: Balance = ()
    norm_epsilon: Positive = 1e-5

    architecture = "HunYuanMoEV1ForCausalLM"
    attention_fixed = {"qk_norm": "head", "norm_after_rope": True}
    attention_fields = ("bias",)
    hf_sizes = names.gqa_sizes("num_experts", "intermediate_size", "moe_topk")
    fields = (
        *head_fields(),
        bias_field("attention_bias", False, "all"),
        Ignored(("eod_token_id",)),
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(),
        *names.attention_names({"q_norm": "query_layernorm", "k_norm": "key_layernorm"}),
        *names.projection_bias_names("qkvo"),
        *names.expert_names("gate.wg.weight", "gate.wg.weight"),
        *names.shared_names("shared_mlp"),
    )
