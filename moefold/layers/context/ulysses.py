"""Rows change hands for heads: each rank attends with its share of heads over all rows.

T rows here, R rows of all ranks, H query heads, G key-value heads, d and v dims per head, n ranks.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.group import Group
from moefold.kernels.attention.block import attention as tiled
from moefold.kernels.attention.sdpa import attention
from moefold.layers.config import Ulysses
from moefold.layers.context.sight import Sight
from moefold.layers.flow import Flow, in_order


def attend(
    record: Ulysses,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    scale: float,
    flow: Flow,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv`` of this rank's rows; in between each rank has all rows in order."""
    ranks = flow.world.group("cp")
    q, k, v = to_heads((q_THd, k_TGd, v_TGv), ranks)
    sinks_h = heads_here(sinks_H, ranks)
    return to_rows(on_one_rank(q, k, v, flow.rows.lengths, scale, window, sinks_h), ranks)


def on_one_rank(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv`` of rows that are all here, tile by tile where a window or sinks ask it."""
    if window is None and sinks_H is None:
        return attention(q_THd, k_TGd, v_TGv, lengths, scale)
    tiles = Sight(lengths, q_THd.shape[0], 1, window).tiles(0, 0)
    return tiled(q_THd, k_TGd, v_TGv, tiles, scale, sinks_H=sinks_H)


def heads_here(sinks_H: Tensor | None, ranks: Group) -> Tensor | None:
    """Return the sinks of the heads that this rank gets by :func:`to_heads`."""
    if sinks_H is None or ranks.size == 1:
        return sinks_H
    return sinks_H.unflatten(0, (ranks.size, -1))[ranks.index]


def to_heads(rows: tuple[Tensor, ...], ranks: Group) -> tuple[Tensor, ...]:
    """Give each rank its share of the heads of all rows, in the order of the micro-batch.

    Args:
        rows: tensors [T, heads, dims]; the ranks divide the heads of each.
        ranks: neighbours among the context ranks.

    Returns:
        Tensors [n * T, heads / n, dims], exchanged together.
    """
    if ranks.size == 1:
        return rows
    n, count = ranks.size, rows[0].shape[0]
    shares = [x.unflatten(1, (n, -1)).movedim(1, 0).flatten(0, 1).flatten(1) for x in rows]
    equal = [count] * n
    arrived = all_to_all(torch.cat(shares, 1), ranks, equal, equal)
    widths = [share.shape[1] for share in shares]
    whole = in_order(arrived, n).flatten(0, 1).split(widths, 1)
    return tuple(x.unflatten(1, (-1, of.shape[-1])) for x, of in zip(whole, rows, strict=True))


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
