"""Mixtral (arXiv 2401.04088): grouped-query attention, weights always renormalised."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import Rope
from moefold.model.config import MODEL, Block
from moefold.model.families.base import Balance
from moefold.model.families.gqa import HF_SIZES, FreeGqaSizes, GqaFamily, gqa, read_heads
from moefold.model.families.hub import ConfigReader, aux_coefficient, read_aux, read_rope
from moefold.model.families.names import entry, gqa_names, llama_names
from moefold.moe.config import Aux

_APART = "model.layers.{i}.block_sparse_moe"
_PACKED = "model.layers.{i}.mlp"
_THETA = 1e6
_AUX = 1e-3  # the default of transformers' class


class MixtralShape(FreeGqaSizes):
    """Sizes of a Mixtral."""


@MODEL.register
class Mixtral(GqaFamily):
    """A Mixtral."""

    family: Literal["mixtral"] = "mixtral"
    shape: MixtralShape
    balance: Balance = (Aux(coefficient=_AUX),)
    rope: Rope = Rope(theta=_THETA)
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    hf_sizes = {**HF_SIZES, "num_local_experts": "experts", "intermediate_size": "expert_width"}
    tensors = (
        *llama_names(),
        *gqa_names(qk_norm=False),
        entry(
            "layers.{i}.moe.router.weight", f"{_APART}.gate.weight", packed=f"{_PACKED}.gate.weight"
        ),
        entry(
            "layers.{i}.moe.experts.w_in",
            f"{_APART}.experts.{{e}}.w1.weight",
            f"{_APART}.experts.{{e}}.w3.weight",
            packed=f"{_PACKED}.experts.gate_up_proj",
        ),
        entry(
            "layers.{i}.moe.experts.w_out",
            f"{_APART}.experts.{{e}}.w2.weight",
            packed=f"{_PACKED}.experts.down_proj",
        ),
    )

    def blocks(self) -> Sequence[Block]:
        """Equal blocks throughout."""
        return [Block(attention=gqa(self.shape, self.rope), ffn=self.moe())] * self.shape.layers

    def rules(self) -> Iterator[Violation]:
        """Weights are always renormalised, so that one expert alone would teach nothing."""
        for broken in super().rules():
            if broken.path != ("renormalise",):
                yield broken
        name = "experts" if self.shape.experts == 1 else "top_k"
        if self.router is None and getattr(self.shape, name) == 1:
            rule = "must be at least 2: the renormalised weight of one expert is always 1"
            yield Violation(("shape", name), 1, rule, 2)

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Take Mixtral's own fields."""
        config.only("sliding_window", None)
        return {
            "shape": read_heads(config),
            "rope": read_rope(config, _THETA, scales_softmax=False),
            "balance": read_aux(config, cls.model_type, _AUX),
        }

    def write(self) -> dict[str, Any]:
        """Return Mixtral's own fields."""
        return {
            "head_dim": self.shape.dims_per_head,
            "sliding_window": None,
            "router_jitter_noise": 0.0,
            "router_aux_loss_coef": aux_coefficient(self.balance),
        }
