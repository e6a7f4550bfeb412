"""Rows change hands for heads: each rank attends with its share of heads over all rows.

T rows here, R rows of all ranks, H query heads, G key-value heads, d and v dims per head, n ranks.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.group import Group
from moefold.kernels.attention.sdpa import attention
from moefold.layers.config import Ulysses
from moefold.layers.flow import Flow


def attend(
    record: Ulysses, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, scale: float, flow: Flow
) -> Tensor:
    """Return ``out_THv`` of this rank's rows; in between each rank has all rows in order."""
    ranks = flow.world.group("cp")
    q, k, v = to_heads((q_THd, k_TGd, v_TGv), ranks)
    return to_rows(attention(q, k, v, flow.rows.lengths, scale), ranks)


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
    whole = _in_order(arrived, n).split(widths, 1)
    return tuple(x.unflatten(1, (-1, of.shape[-1])) for x, of in zip(whole, rows, strict=True))


def to_rows(out_Rhv: Tensor, ranks: Group) -> Tensor:
    """Give each rank all heads of its rows again: from [n * T, heads / n, dims] to [T, H, dims]."""
    if ranks.size == 1:
        return out_Rhv
    n = ranks.size
    equal = [out_Rhv.shape[0] // n] * n
    arrived = all_to_all(_by_rank(out_Rhv, n).contiguous(), ranks, equal, equal)
    return arrived.unflatten(0, (n, -1)).movedim(0, 1).flatten(1, 2)


def _in_order(x_RX: Tensor, ranks: int) -> Tensor:
    """Undo the zigzag: first pieces in the ranks' order, then second ones in the opposite one."""
    pieces = x_RX.unflatten(0, (ranks, 2, -1))
    return torch.cat([pieces[:, 0].flatten(0, 1), pieces[:, 1].flip(0).flatten(0, 1)])


def _by_rank(x_RX: Tensor, ranks: int) -> Tensor:
    """Put rows in the micro-batch's order one rank after the other."""
    first, second = x_RX.unflatten(0, (2, ranks, -1)).unbind()
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)
