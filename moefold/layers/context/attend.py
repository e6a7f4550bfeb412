"""Causal attention with context parallelism: all-gather, Ulysses and mixed.

T local rows, U or R rows of all ranks, H query heads, G key-value heads, d query-key and v value
dims per head, n ranks that divide heads.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_to_all, gather
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.config.slot import build
from moefold.kernels.attention.block import Tile, max_logits
from moefold.kernels.attention.block import attention as tiled
from moefold.kernels.attention.sdpa import attention
from moefold.layers.config import Gathered, Mixed, Ulysses
from moefold.layers.context.ring import ring_attention
from moefold.layers.context.visibility import AttentionInputs, Visibility
from moefold.layers.flow import Flow, undo_zigzag


def attend(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    scale: float,
    flow: Flow,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv``: each row attends to its segment's rows up to itself, on all ranks.

    ``window`` and ``sinks_H`` are those of :class:`AttentionInputs`.
    """
    heads = AttentionInputs(q_THd, k_TGd, v_TGv, scale, flow.rows.lengths, window, sinks_H)
    if flow.world.group("cp").size == 1:
        return local_attention(heads)
    assert flow.context is not None, "cp2 or more needs layout.context"
    return build(flow.context, heads, flow.world)


def local_max_logits(
    q_THd: Tensor, k_TGd: Tensor, scale: float, flow: Flow, window: int | None = None
) -> Tensor:
    """Return the largest logit, at least 0, of each head over this rank's rows and all keys.

    Context ranks all-gather their keys for it.
    """
    ranks = flow.world.group("cp")
    k_UGd = gather(k_TGd, ranks).flatten(0, 1) if ranks.size > 1 else k_TGd
    visibility = Visibility(flow.rows.lengths, q_THd.shape[0], ranks.size, window)
    return max_logits(q_THd, k_UGd, rank_tiles(visibility, ranks.index), scale)


def all_gather_attention(record: Gathered, heads: AttentionInputs, world: World) -> Tensor:
    """Attend to keys and values gathered from all ranks; backward is a reduce-scatter."""
    ranks = world.group("cp")
    (k_TGd, v_TGv) = heads[1:3]
    widths = [k_TGd[0].numel(), v_TGv[0].numel()]
    kv_UW = all_gather(torch.cat([k_TGd.flatten(1), v_TGv.flatten(1)], 1), ranks)
    k_UG, v_UG = kv_UW.split(widths, 1)
    k_UGd = k_UG.unflatten(1, k_TGd.shape[1:])
    v_UGv = v_UG.unflatten(1, v_TGv.shape[1:])
    tiles = rank_tiles(heads.visibility(ranks.size), ranks.index)
    return tiled(heads.q_THd, k_UGd, v_UGv, tiles, heads.scale, sinks_H=heads.sinks_H)


def rank_tiles(visibility: Visibility, rank: int) -> list[Tile]:
    """Return the tiles of a rank's rows over keys concatenated by rank."""
    others = (owner for owner in range(visibility.ranks) if owner != rank)
    tiles = []
    for owner in (rank, *others):
        first = owner * visibility.rows
        tiles += [tile.shift_keys(first) for tile in visibility.tiles(rank, owner)]
    return tiles


def ulysses_attention(record: Ulysses, heads: AttentionInputs, world: World) -> Tensor:
    """Attend with some of the heads over all rows, after an all-to-all."""
    ranks = world.group("cp")
    return heads_to_rows(local_attention(rows_to_heads(heads, ranks)), ranks)


def local_attention(heads: AttentionInputs) -> Tensor:
    """Return ``out_THv`` where all rows are local; by tiles if there is a window or sinks."""
    q_THd, k_TGd, v_TGv, scale, lengths, window, sinks_H = heads
    if window is None and sinks_H is None:
        return attention(q_THd, k_TGd, v_TGv, lengths, scale)
    tiles = heads.visibility(1).tiles(0, 0)
    return tiled(q_THd, k_TGd, v_TGv, tiles, scale, sinks_H=sinks_H)


def rows_to_heads(heads: AttentionInputs, ranks: Group) -> AttentionInputs:
    """Exchange rows for heads: return [n * T, heads / n, dims] in the order of the micro-batch.

    ``ranks`` are neighbouring context ranks that divide the heads. One all-to-all exchanges
    queries, keys and values.
    """
    if ranks.size == 1:
        return heads
    n = ranks.size
    rows = heads[:3]
    sinks_H = heads.sinks_H
    # Heads are cut into a share of each rank, and rows ordered by the rank that gets them.
    by_rank = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in rows]
    shares = [x.flatten(0, 1).flatten(1) for x in by_rank]
    equal = [rows[0].shape[0]] * n
    arrived = all_to_all(torch.cat(shares, 1), ranks, equal, equal)
    widths = [share.shape[1] for share in shares]
    gathered = undo_zigzag(arrived, n).flatten(0, 1).split(widths, 1)
    dims = [x.shape[-1] for x in rows]
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(gathered, dims, strict=True))
    if sinks_H is not None:
        sinks_H = sinks_H.unflatten(0, (n, -1))[ranks.index]
    return heads._replace(q_THd=q, k_TGd=k, v_TGv=v, sinks_H=sinks_H)


def heads_to_rows(out_Rhv: Tensor, ranks: Group) -> Tensor:
    """Exchange heads for rows: from [n * T, heads / n, dims] back to [T, H, dims]."""
    if ranks.size == 1:
        return out_Rhv
    n = ranks.size
    equal = [out_Rhv.shape[0] // n] * n
    # From the order of the micro-batch to concatenation by rank, the inverse of ``undo_zigzag``.
    first, second = out_Rhv.unflatten(0, (2, n, -1)).unbind()
    by_rank = torch.stack([first, second.flip(0)], 1).flatten(0, 2)
    arrived = all_to_all(by_rank.contiguous(), ranks, equal, equal)
    return arrived.unflatten(0, (n, -1)).movedim(0, 1).flatten(1, 2)


def mixed_attention(record: Mixed, heads: AttentionInputs, world: World) -> Tensor:
    """Attend in two levels: neighbours divide heads, and a ring connects such groups.

    The joint rows of neighbours are again two pieces, one from either end: a zigzag over groups.
    """
    inner, outer = world.split("cp", record.heads)
    return heads_to_rows(ring_attention(rows_to_heads(heads, inner), outer), inner)
