"""Causal attention over rows that context ranks may share.

T rows here, H query heads, G key-value heads, d query-key dims and v value dims per head.
"""

from torch import Tensor

from moefold.comm.collectives import gather
from moefold.config.slot import build
from moefold.kernels.attention.block import largest_logits
from moefold.layers.context.gathered import tiles_of
from moefold.layers.context.sight import Heads, Sight
from moefold.layers.context.ulysses import on_one_rank
from moefold.layers.flow import Flow


def attend(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    scale: float,
    flow: Flow,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv``; each row sees the rows of its own segment up to itself, on any rank.

    Args:
        q_THd: queries.
        k_TGd: keys.
        v_TGv: values.
        scale: factor on the scores.
        flow: the pass, which knows the segments and the context ranks.
        window: rows that a row sees, itself among them; None is all before it.
        sinks_H: a logit of each head here that takes weight and gives nothing.
    """
    heads = Heads(q_THd, k_TGd, v_TGv, scale, flow.rows.lengths, window, sinks_H)
    if flow.world.group("cp").size == 1:
        return on_one_rank(heads)
    assert flow.context is not None, "context ranks share rows and no kind says how"
    return build(flow.context, heads, flow.world)


def largest(
    q_THd: Tensor, k_TGd: Tensor, scale: float, flow: Flow, window: int | None = None
) -> Tensor:
    """Return the largest logit of each head over this rank's rows and what they see, on any rank.

    It is zero at least. Where ranks share rows they bring their keys together.
    """
    ranks = flow.world.group("cp")
    k_UGd = gather(k_TGd, ranks).flatten(0, 1) if ranks.size > 1 else k_TGd
    sight = Sight(flow.rows.lengths, q_THd.shape[0], ranks.size, window)
    return largest_logits(q_THd, k_UGd, tiles_of(sight, ranks.index), scale)
