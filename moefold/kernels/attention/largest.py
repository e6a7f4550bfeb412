"""The largest logit of each head over what rows see, which fused attention does not tell.

U rows of keys, H query heads, d dims per head; in a tile N segments of S queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.kernels.attention import block_plain
from moefold.kernels.attention.block import Tile, segments_of

PIECE = 1 << 24
"""Scores that exist at once."""


@torch.no_grad()
def largest_logits(q_THd: Tensor, k_UGd: Tensor, tiles: Sequence[Tile], scale: float) -> Tensor:
    """Return [H] in fp32 or wider; zero where every logit is below, and of heads that see nothing.

    Scores are computed once more, some queries at a time.
    """
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    largest_H = q_THd.new_zeros(q_THd.shape[1], dtype=wide)
    for tile in tiles:
        q, k = (segments_of(x, tile) for x in (q_THd[tile.queries], k_UGd[tile.keys]))
        q, k, _ = block_plain.alike(q, k, k, wide)
        count, keys = q.shape[2], k.shape[2]
        rows = max(1, PIECE // (q.shape[0] * q.shape[1] * keys))
        behind, window = tile.band or (0, count)
        hides = tile.band is not None or tile.segments > 0
        for start in range(0, count, rows):
            band = (behind + start, window) if hides else None
            part = block_plain.scores(q[:, :, start : start + rows], k, scale, False, band)
            largest_H = torch.maximum(largest_H, part.amax((0, 2, 3)))
    return largest_H
