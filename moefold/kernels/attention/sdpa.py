"""Causal attention within segments by ``scaled_dot_product_attention``.

Consecutive segments of equal length form one batch, so that a micro-batch of whole sequences is one
call and no pair of rows from different segments is ever computed.

T rows, H query heads, G key-value heads, d and v dims per head.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.attention import block_fused
from moefold.kernels.attention.block import Tile, causal_tiles, to_rows, to_segments
from moefold.kernels.function import Function


def attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Return ``out_THv``; rows beyond the segments get zeros.

    Values narrower than keys are padded with zeros for the fused kernels, unless cuDNN takes them
    (torch's fallback is more than twice as slow), and on a CPU 16-bit rows of short segments are
    converted to fp32 for backward. Saved tensors are neither padded nor converted.
    """
    narrower = v_TGv.shape[-1] < q_THd.shape[-1]
    converted = narrower or (q_THd.is_cpu and q_THd.dtype.itemsize == 2)
    if converted and block_fused.fits(q_THd, v_TGv) and not _cudnn_supports(q_THd, k_TGd, v_TGv):
        return _SaveUnpadded.apply(q_THd, k_TGd, v_TGv, lengths, scale)
    inputs = (q_THd, k_TGd, v_TGv)
    tiles, row_counts = _tiles_and_lengths(lengths, q_THd.shape[0])
    # No split into one piece, whose backward would copy.
    pieces = zip(
        *(x.split(row_counts) if len(row_counts) > 1 else (x,) for x in inputs), strict=True
    )
    run = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
    grouped = q_THd.shape[1] != k_TGd.shape[1]
    out = list[Tensor]()
    for tile, piece in zip(tiles, pieces, strict=False):
        q, k, v = (to_segments(x, tile) for x in piece)
        out.append(to_rows(run(q, k, v, enable_gqa=grouped)))
    if not out:
        # Zeros that depend on the inputs, so that weights get zero gradients rather than None.
        zero = q_THd[:0].sum() + k_TGd[:0].sum() + v_TGv[:0].sum()
        return zero.expand(*q_THd.shape[:2], v_TGv.shape[-1])
    return _concatenate(out, q_THd[..., :1].expand(-1, -1, v_TGv.shape[-1]))


def _cudnn_supports(q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor) -> bool:
    """Return whether cuDNN's kernels are available and take values narrower than keys; on Hopper
    they are 2.2 times as fast as padded ones."""
    if not q_THd.is_cuda:
        return False
    q, k, v = (x[None].transpose(1, 2) for x in (q_THd, k_TGd, v_TGv))
    grouped = q_THd.shape[1] != k_TGd.shape[1]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _tiles_and_lengths(lengths: tuple[int, ...], count: int) -> tuple[list[Tile], list[int]]:
    """Return the tiles of segments, and the row counts of each tile and of the rows beyond."""
    tiles = causal_tiles(lengths)
    row_counts = [tile.queries.stop - tile.queries.start for tile in tiles]
    tail = count - sum(row_counts)
    return tiles, [*row_counts, tail] if tail else row_counts


def _concatenate(pieces: list[Tensor], like_THd: Tensor) -> Tensor:
    """Concatenate pieces, followed by zeros up to the shape of ``like_THd``."""
    tail = like_THd.shape[0] - sum(piece.shape[0] for piece in pieces)
    if tail or not pieces:
        pieces = [*pieces, like_THd.new_zeros(tail, *like_THd.shape[1:])]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _SaveUnpadded(Function):
    """Attention whose inputs are padded or converted for the kernels but saved unchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        tiles, row_counts = _tiles_and_lengths(lengths, q_THd.shape[0])
        pieces = zip(*(x.split(row_counts) for x in (q_THd, k_TGd, v_TGv)), strict=True)
        results: list[tuple[Tensor, Tensor]] = []
        for tile, segments in zip(tiles, pieces, strict=False):
            q, k, v = (to_segments(x, tile) for x in segments)
            results.append(block_fused.forward(q, k, v, scale, True))
        like_THv = q_THd[..., :1].expand(-1, -1, v_TGv.shape[-1])
        out_THv = _concatenate([to_rows(out) for out, _ in results], like_THv).contiguous()
        ctx.save_for_backward(q_THd, k_TGd, v_TGv, out_THv, *(lse for _, lse in results))
        ctx.lengths = lengths
        ctx.scale = scale
        return out_THv

    @staticmethod
    def backward(ctx: Any, grad_THv: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGv, out_THv, *statistics = ctx.saved_tensors
        tiles, row_counts = _tiles_and_lengths(ctx.lengths, q_THd.shape[0])
        pieces = zip(
            *(x.split(row_counts) for x in (grad_THv, q_THd, k_TGd, v_TGv, out_THv)), strict=True
        )
        results: list[tuple[Tensor, ...]] = []
        for tile, lse, segments in zip(tiles, statistics, pieces, strict=False):
            grad, q, k, v, out = (to_segments(x, tile) for x in segments)
            results.append(block_fused.backward(grad, q, k, v, out, lse, ctx.scale, True))
        gradients = (
            _concatenate([to_rows(result[i]) for result in results], like)
            for i, like in enumerate((q_THd, k_TGd, v_TGv))
        )
        return *gradients, None, None
