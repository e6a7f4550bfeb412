"""Parts shared by families with DeepSeek-V3's router, multi-token blocks or latent attention."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from moefold.config.errors import Violation
from moefold.layers.config import Positive
from moefold.model.config import Block, Decoder, MultiToken
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import BIAS_RATE
from moefold.model.families.layer_kinds import RecordSizes
from moefold.model.families.names import HF_SIZES
from moefold.model.families.sizes import LATENT_DIMS
from moefold.moe.config import Bias, Groups

SIZES = HF_SIZES | {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_width",
}
_RANKS = ("q_lora_rank", None), ("kv_lora_rank", 512)
_DIMS = ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128)
LATENT = RecordSizes(dict(zip(LATENT_DIMS, (*_RANKS, *_DIMS), strict=True)), "latent")
"""Sizes of latent attention, in a nested record."""
LATENT_SIZES = SIZES | {hf_name: name for name, (hf_name, _) in LATENT.fields.items()}
SIGMOID = {"score": "sigmoid", "epsilon": 1e-20, "selection_bias": True}
"""Fixed fields of the router: experts and groups are chosen by score plus bias."""


class SigmoidFamily(Family):
    """Base of families with DeepSeek-V3's router."""

    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: Positive = 2.5
    """Factor on the weights of routed experts."""
    groups: Groups | None = None
    """Group-limited routing; None chooses among all experts."""
    balance: Balance = (Bias(rate=BIAS_RATE),)

    router_fixed = SIGMOID
    router_fields = ("renormalise", "scale", "groups")

    def rules(self) -> Iterator[Violation]:
        """Check the rules of all families, fixed router settings, and the score of groups."""
        yield from super().rules()
        for name in set(SigmoidFamily.router_fields).difference(self.router_fields):
            value = getattr(self, name)
            default = type(self).model_fields[name].default
            if value != default:
                yield Violation((name,), value, f"must be {default} in this family", default)
        rule = "this family must score a group by the sum of its two best experts"
        if self.groups is not None and self.groups.score != "sum_best":
            yield Violation(("groups", "score"), self.groups.score, rule, "sum_best")
        if self.groups is not None and self.groups.best != 2:
            yield Violation(("groups", "best"), self.groups.best, rule, 2)


class MultiTokenFamily(SigmoidFamily):
    """Base of families with DeepSeek-V3's router and multi-token prediction blocks."""

    multi_token: tuple[MultiToken, ...] = ()
    """Loss of each further token, such as ``[{weight: 0.3}]``; empty: no such blocks."""

    def blocks(self) -> Sequence[Block]:
        """Return all blocks in order; multi-token blocks are copies of the last one."""
        main = super().blocks()
        further = (main[-1].model_copy(update={"multi_token": m}) for m in self.multi_token)
        return [*main, *further]

    @classmethod
    def guess(cls, decoder: Decoder) -> Self:
        """Infer the record, with the losses of multi-token prediction."""
        return super().guess(decoder).model_copy(update={"multi_token": decoder.multi_token})

    @classmethod
    def copies(cls, decoder: Decoder) -> Mapping[str, tuple[str, ...]]:
        """Return the copies of embedding and head that multi-token blocks have on disk."""
        layers = [f"model.layers.{n}" for n in range(decoder.layers, len(decoder.blocks))]
        return {
            "embed.weight": tuple(f"{layer}.embed_tokens.weight" for layer in layers),
            "head.weight": tuple(f"{layer}.shared_head.head.weight" for layer in layers),
        }
