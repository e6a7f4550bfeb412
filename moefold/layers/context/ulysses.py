"""Rows change hands for heads: each rank attends with its share of heads over all rows.

T rows here, R rows of all ranks, H query heads, G key-value heads, d and v dims per head, n ranks.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.kernels.attention.block import attention as tiled
from moefold.kernels.attention.sdpa import attention
from moefold.layers.config import Ulysses
from moefold.layers.context.sight import Heads
from moefold.layers.flow import in_order


def attend(record: Ulysses, heads: Heads, world: World) -> Tensor:
    """Return ``out_THv`` of this rank's rows; in between each rank has all rows in order."""
    ranks = world.group("cp")
    return to_rows(on_one_rank(to_heads(heads, ranks)), ranks)


def on_one_rank(heads: Heads) -> Tensor:
    """Return ``out_THv`` of rows that are all here, tile by tile where a window or sinks ask it."""
    q_THd, k_TGd, v_TGv, scale, lengths, window, sinks_H = heads
    if window is None and sinks_H is None:
        return attention(q_THd, k_TGd, v_TGv, lengths, scale)
    return tiled(q_THd, k_TGd, v_TGv, heads.sight(1).tiles(0, 0), scale, sinks_H=sinks_H)


def to_heads(heads: Heads, ranks: Group) -> Heads:
    """Give each rank its share of the heads of all rows, in the order of the micro-batch.

    ``ranks``, neighbours among the context ranks, divide the heads; [n * T, heads / n, dims] of
    queries, keys and values are exchanged together.
    """
    if ranks.size == 1:
        return heads
    n, rows, sinks_H = ranks.size, heads[:3], heads.sinks_H
    shares = [x.unflatten(1, (n, -1)).movedim(1, 0).flatten(0, 1).flatten(1) for x in rows]
    equal = [rows[0].shape[0]] * n
    arrived = all_to_all(torch.cat(shares, 1), ranks, equal, equal)
    widths = [share.shape[1] for share in shares]
    whole = in_order(arrived, n).flatten(0, 1).split(widths, 1)
    q, k, v = (x.unflatten(1, (-1, of.shape[-1])) for x, of in zip(whole, rows, strict=True))
    sinks_H = None if sinks_H is None else sinks_H.unflatten(0, (n, -1))[ranks.index]
    return heads._replace(q_THd=q, k_TGd=k, v_TGv=v, sinks_H=sinks_H)


def to_rows(out_Rhv: Tensor, ranks: Group) -> Tensor:
    """Give each rank all heads of its rows again: from [n * T, heads / n, dims] to [T, H, dims]."""
    if ranks.size == 1:
        return out_Rhv
    n = ranks.size
    equal = [out_Rhv.shape[0] // n] * n
    arrived = all_to_all(_by_rank(out_Rhv, n).contiguous(), ranks, equal, equal)
    return arrived.unflatten(0, (n, -1)).movedim(0, 1).flatten(1, 2)


def _by_rank(x_RX: Tensor, ranks: int) -> Tensor:
    """Put rows in the micro-batch's order one rank after the other."""
    first, second = x_RX.unflatten(0, (2, ranks, -1)).unbind()
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)
