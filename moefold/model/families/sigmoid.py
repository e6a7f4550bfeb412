"""What families with DeepSeek-V3's router, or its latent attention, share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from moefold.config.errors import Violation
from moefold.layers.config import Positive
from moefold.model.config import Block, Decoder, MultiToken
from moefold.model.families.base import Balance, Family
from moefold.model.families.fields import RATE
from moefold.model.families.layer_kinds import RecordSizes
from moefold.model.families.names import HF_SIZES, multi_token_copies
from moefold.model.families.sizes import LATENTS
from moefold.moe.config import Bias, Groups

SIZES = HF_SIZES | {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_width",
}
_RANKS = ("q_lora_rank", None), ("kv_lora_rank", 512)
_DIMS = ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128)
LATENT = RecordSizes(dict(zip(LATENTS, (*_RANKS, *_DIMS), strict=True)), "latent")
"""Sizes of latent attention in a record of their own."""
LATENT_SIZES = SIZES | {theirs: ours for ours, (theirs, _) in LATENT.names.items()}
SIGMOID = {"score": "sigmoid", "epsilon": 1e-20, "selection_bias": True}
"""Scores of the router: the choice, in groups too, is by score plus bias, the weights without."""


class SigmoidFamily(Family):
    """What families with DeepSeek-V3's router share."""

    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: Positive = 2.5
    """Factor on the weights of routed experts."""
    groups: Groups | None = None
    """Groups of experts that routing is limited to; None chooses among all."""
    balance: Balance = (Bias(rate=RATE),)

    router_own = SIGMOID
    router_fields = ("renormalise", "scale", "groups")

    def rules(self) -> Iterator[Violation]:
        """What all families share, and how this one scores a group."""
        yield from super().rules()
        for name in set(SigmoidFamily.router_fields).difference(self.router_fields):
            value, own = getattr(self, name), type(self).model_fields[name].default
            if value != own:
                yield Violation((name,), value, f"this family's router has {own}", own)
        rule = "this family scores a group by the sum of its best two"
        if self.groups is not None and self.groups.score != "sum_best":
            yield Violation(("groups", "score"), self.groups.score, rule, "sum_best")
        if self.groups is not None and self.groups.best != 2:
            yield Violation(("groups", "best"), self.groups.best, rule, 2)


class MultiTokenFamily(SigmoidFamily):
    """One whose folders have blocks of further tokens too."""

    multi_token: tuple[MultiToken, ...] = ()
    """The loss of each further token, such as ``[{weight: 0.3}]``; none: the next one's alone."""

    def blocks(self) -> Sequence[Block]:
        """Every block in order, those of further tokens like the last."""
        main = super().blocks()
        more = (main[-1].model_copy(update={"multi_token": one}) for one in self.multi_token)
        return [*main, *more]

    @classmethod
    def guess(cls, decoder: Decoder) -> Self:
        """Return the record, its losses of further tokens among it."""
        return super().guess(decoder).model_copy(update={"multi_token": decoder.multi_token})

    @classmethod
    def copies(cls, decoder: Decoder) -> Mapping[str, tuple[str, ...]]:
        """Blocks of further tokens have embedding and head once more."""
        return multi_token_copies(range(decoder.layers, len(decoder.blocks)))
