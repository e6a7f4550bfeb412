"""OLMoE (arXiv 2409.02060): q/k norms over whole projections, weights not renormalised."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.model.config import MODEL, Block
from moefold.model.families.base import Balance
from moefold.model.families.gqa import HF_SIZES, GqaFamily, GqaSizes, gqa, read_kv_heads
from moefold.model.families.hub import ConfigReader, aux_coefficient, read_aux, read_rope
from moefold.model.families.names import expert_names, gqa_names, llama_names
from moefold.moe.config import Aux, Z

_THETA = 1e4
_AUX = 1e-2  # the default of transformers' class, and the coefficient of the report


class OlmoeShape(GqaSizes):
    """Sizes of an OLMoE."""


@MODEL.register
class Olmoe(GqaFamily):
    """An OLMoE, by default with the report's z-loss too."""

    family: Literal["olmoe"] = "olmoe"
    shape: OlmoeShape
    renormalise: bool = False
    """Whether the chosen probabilities are divided by their sum."""
    balance: Balance = (Aux(coefficient=_AUX), Z(coefficient=1e-3))
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    hf_sizes = {**HF_SIZES, "num_experts": "experts", "intermediate_size": "expert_width"}
    tensors = (*llama_names(), *gqa_names(qk_norm=True), *expert_names())

    router_fields = ("renormalise",)

    def blocks(self) -> Sequence[Block]:
        """Equal blocks throughout."""
        attention = gqa(self.shape, self.rope, qk_norm="projection")
        return [Block(attention=attention, ffn=self.moe())] * self.shape.layers

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Take OLMoE's own fields."""
        config.only("clip_qkv", None)
        config.only("sliding_window", None)
        heads = config.take("num_attention_heads", int)
        config.only("head_dim", None, config.take("hidden_size", int) // (heads or 1))
        return {
            "shape": read_kv_heads(config),
            "rope": read_rope(config, _THETA, scales_softmax=False),
            "renormalise": config.take("norm_topk_prob", bool, False),
            "balance": read_aux(config, cls.model_type, _AUX),
        }

    def write(self) -> dict[str, Any]:
        """Return OLMoE's own fields."""
        return {
            "clip_qkv": None,
            "norm_topk_prob": self.renormalise,
            "router_aux_loss_coef": aux_coefficient(self.balance),
        }
