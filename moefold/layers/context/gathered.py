"""Keys and values of all context ranks on each of them; queries stay where they are.

T rows here, U rows of all ranks, H query heads, G key-value heads, d and v dims per head.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather
from moefold.comm.world import World
from moefold.kernels.attention.block import Tile, attention
from moefold.layers.config import Gathered
from moefold.layers.context.sight import Heads, Sight


def attend(record: Gathered, heads: Heads, world: World) -> Tensor:
    """Return ``out_THv`` of this rank's rows; gradients of keys and values are summed at home."""
    ranks, (k_TGd, v_TGv) = world.group("cp"), heads[1:3]
    kv_UW = all_gather(torch.cat([k_TGd.flatten(1), v_TGv.flatten(1)], 1), ranks)
    k_UG, v_UG = kv_UW.split([k_TGd[0].numel(), v_TGv[0].numel()], 1)
    k_UGd, v_UGv = k_UG.unflatten(1, k_TGd.shape[1:]), v_UG.unflatten(1, v_TGv.shape[1:])
    tiles = tiles_of(heads.sight(ranks.size), ranks.index)
    return attention(heads.q_THd, k_UGd, v_UGv, tiles, heads.scale, sinks_H=heads.sinks_H)


def tiles_of(sight: Sight, rank: int) -> list[Tile]:
    """Return what a rank's rows see where the ranks' rows lie one rank after the other."""
    others = (owner for owner in range(sight.ranks) if owner != rank)
    return [
        tile.moved(owner * sight.rows)
        for owner in (rank, *others)
        for tile in sight.tiles(rank, owner)
    ]
