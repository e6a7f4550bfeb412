"""Attention block by block with online softmax: each row's statistics are merged over blocks.

T rows of queries, U rows of keys, H query heads, G key-value heads, d and v dims per head; in a
kernel N segments of S rows.

With ``lse`` the logarithm of a row's denominator over the keys of one block, two blocks give
``lse = log(e^lse_1 + e^lse_2)`` and ``out = out_1 e^(lse_1 - lse) + out_2 e^(lse_2 - lse)``.
Backward sums over blocks in any order, given ``out`` and ``lse`` of whole rows.

A sink is an additional learned logit of each head with a value of zero: it only takes weight
(gpt-oss). So a row begins with the sink as its denominator and an output of zeros.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.attention import block_fused, block_plain
from moefold.kernels.function import Function
from moefold.kernels.rows import upcast_dtype

MAX_SCORES = 1 << 24
"""Largest number of scores per chunk of :func:`max_logits`."""


class Band(NamedTuple):
    """A diagonal band: query a sees key b where ``0 <= offset + a - b < window``."""

    offset: int
    """Number of rows by which the first query follows the first key."""
    window: int


class Tile(NamedTuple):
    """A range of queries, a range of keys, and the mask between them."""

    queries: slice
    keys: slice
    segments: int = 0
    """Number of segments of equal length, each with a causal mask; with 0 every query sees every
    key."""
    band: Band | None = None
    """Mask in place of the causal one, where a window ends in the tile."""

    def shift_keys(self, keys: int) -> "Tile":
        """Return the tile with its keys shifted by ``keys`` rows."""
        return self._replace(keys=slice(self.keys.start + keys, self.keys.stop + keys))


def causal_tiles(lengths: Iterable[int]) -> list[Tile]:
    """Return causal tiles of consecutive segments; neighbours of equal length share a tile."""
    tiles = list[Tile]()
    start = 0
    for length, same in groupby(length for length in lengths if length):
        count = len(list(same))
        end = start + length * count
        tiles.append(Tile(slice(start, end), slice(start, end), count))
        start = end
    return tiles


def choose_kernel(tile: Tile, q_NHSd: Tensor, v_NGUv: Tensor) -> tuple[ModuleType, tuple[Any, ...]]:
    """Return the kernels for a tile's queries and values, and their arguments for its mask.

    Fused kernels are chosen where they support the shapes; bands use plain torch.
    """
    if tile.band is not None:
        return block_plain, (False, tile.band)
    kernel = block_fused if block_fused.fits(q_NHSd, v_NGUv) else block_plain
    return kernel, (tile.segments > 0,)


class OnlineSoftmax:
    """Output and softmax statistics of rows over the keys so far; zeros for rows without keys."""

    def __init__(
        self, q_THd: Tensor, v_dim: int, scale: float, sinks_H: Tensor | None = None
    ) -> None:
        """Start without keys, with each head's sink if there are sinks, in fp32 or wider."""
        wide = upcast_dtype(q_THd)
        self._q_THd = q_THd
        self._scale = scale
        self.out_THv = q_THd.new_zeros((*q_THd.shape[:2], v_dim), dtype=wide)
        self.lse_TH = q_THd.new_full(q_THd.shape[:2], float("-inf"), dtype=wide)
        if sinks_H is not None:
            self.lse_TH.copy_(sinks_H)

    def update(self, tile: Tile, k_UGd: Tensor, v_UGv: Tensor) -> None:
        """Merge attention of a tile's queries to its keys."""
        q, k, v = _tile_segments(tile, self._q_THd, k_UGd, v_UGv)
        kernel, mask_args = choose_kernel(tile, q, v)
        tile_out, lse = kernel.forward(q, k, v, self._scale, *mask_args)
        out_SHv = self.out_THv[tile.queries]
        lse_SH = self.lse_TH[tile.queries]
        lse = lse.transpose(1, 2).flatten(0, 1)
        merged_SH = torch.logaddexp(lse_SH, lse)
        # Rows without keys so far: avoid inf - inf.
        base_SH = merged_SH.masked_fill(merged_SH == float("-inf"), 0.0)
        out_SHv.mul_((lse_SH - base_SH).exp_()[..., None])
        out_SHv.add_(to_rows(tile_out) * (lse - base_SH).exp_()[..., None])
        lse_SH.copy_(merged_SH)


class BackwardInputs(NamedTuple):
    """Inputs of backward: queries, outputs, log-sum-exp, and gradients of outputs."""

    q_THd: Tensor
    out_THv: Tensor
    lse_TH: Tensor
    grad_THv: Tensor
    scale: float

    def gradients(self, tile: Tile, k_UGd: Tensor, v_UGv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return one tile's contributions to the gradients of its queries, keys and values."""
        q, k, v = _tile_segments(tile, self.q_THd, k_UGd, v_UGv)
        grad, out = (to_segments(x[tile.queries], tile) for x in (self.grad_THv, self.out_THv))
        lse_NHS = to_segments(self.lse_TH[tile.queries], tile)
        kernel, mask_args = choose_kernel(tile, q, v)
        gradients = kernel.backward(grad, q, k, v, out, lse_NHS, self.scale, *mask_args)
        return tuple(to_rows(x) for x in gradients)  # type: ignore[return-value]

    def sink_gradient(self, sinks_H: Tensor | None) -> Tensor | None:
        """Return the gradient of sinks: minus the sum over rows of weight times dout . out."""
        if sinks_H is None:
            return None
        weights_TH = (sinks_H.to(self.lse_TH.dtype) - self.lse_TH).exp()
        delta_TH = (self.grad_THv.to(self.lse_TH.dtype) * self.out_THv).sum(-1)
        return -(weights_TH * delta_TH).sum(0).to(sinks_H.dtype)


class GradientSums:
    """Accumulators of gradients over tiles, in the dtype of the statistics."""

    def __init__(self, q_THd: Tensor, k_UGd: Tensor, v_UGv: Tensor, dtype: torch.dtype) -> None:
        """Start with zeros."""
        self._dtype = q_THd.dtype
        self._sums = [torch.zeros_like(x, dtype=dtype) for x in (q_THd, k_UGd, v_UGv)]

    def add_queries(self, rows: slice, dq: Tensor) -> None:
        """Add a contribution to rows of the queries."""
        self._sums[0][rows] += dq

    def add_keys(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add contributions to rows of the keys and values."""
        self._sums[1][rows] += dk
        self._sums[2][rows] += dv

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values in the queries' dtype."""
        dq, dk, dv = (total.to(self._dtype) for total in self._sums)
        return dq, dk, dv


class _TiledAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_UGd: Tensor,
        v_UGv: Tensor,
        sinks_H: Tensor | None,
        tiles: Sequence[Tile],
        scale: float,
    ) -> Tensor:
        softmax = OnlineSoftmax(q_THd, v_UGv.shape[-1], scale, sinks_H)
        for tile in tiles:
            softmax.update(tile, k_UGd, v_UGv)
        out_THv = softmax.out_THv.to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_UGd, v_UGv, out_THv, softmax.lse_TH, sinks_H)
        ctx.tiles = tiles
        ctx.scale = scale
        return out_THv

    @staticmethod
    def backward(ctx: Any, grad_THv: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_UGd, v_UGv, out_THv, lse_TH, sinks_H = ctx.saved_tensors
        inputs = BackwardInputs(q_THd, out_THv, lse_TH, grad_THv, ctx.scale)
        sums = GradientSums(q_THd, k_UGd, v_UGv, lse_TH.dtype)
        for tile in ctx.tiles:
            dq, dk, dv = inputs.gradients(tile, k_UGd, v_UGv)
            sums.add_queries(tile.queries, dq)
            sums.add_keys(tile.keys, dk, dv)
        return *sums.gradients(), inputs.sink_gradient(sinks_H), None, None


def attention(
    q_THd: Tensor,
    k_UGd: Tensor,
    v_UGv: Tensor,
    tiles: Sequence[Tile],
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention ``out_THv`` with a mask given by tiles; rows of no tile get zeros.

    Args:
        q_THd: queries.
        k_UGd: keys; their rows may differ from those of the queries.
        v_UGv: values.
        tiles: pairs of queries and keys; each pair of rows occurs at most once.
        scale: factor on the scores.
        sinks_H: logit of each head's sink.
    """
    args = (q_THd, k_UGd, v_UGv, sinks_H, tuple(tiles), scale)
    return _TiledAttention.apply(*args)


@torch.no_grad()
def max_logits(q_THd: Tensor, k_UGd: Tensor, tiles: Sequence[Tile], scale: float) -> Tensor:
    """Return the largest logit of each head, or zero if that is larger, [H] in fp32 or wider.

    Scores are recomputed in chunks of queries, as fused attention does not return them.
    """
    max_H = q_THd.new_zeros(q_THd.shape[1], dtype=upcast_dtype(q_THd))
    for tile in tiles:
        q, k = (to_segments(x, tile) for x in (q_THd[tile.queries], k_UGd[tile.keys]))
        q, k, _ = block_plain.repeat_kv(q, k, k, max_H.dtype)
        count = q.shape[2]
        keys = k.shape[2]
        rows = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * keys))
        offset, window = tile.band or (0, count)
        masked = tile.band is not None or tile.segments > 0
        for start in range(0, count, rows):
            band = (offset + start, window) if masked else None
            scores_NHSU = block_plain.scores(q[:, :, start : start + rows], k, scale, False, band)
            max_H = torch.maximum(max_H, scores_NHSU.amax((0, 2, 3)))
    return max_H


def _tile_segments(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = q[tile.queries]
    k = k[tile.keys]
    v = v[tile.keys]
    return to_segments(q, tile), to_segments(k, tile), to_segments(v, tile)


def to_segments(rows: Tensor, tile: Tile) -> Tensor:
    """Return a tile's rows [N * S, H, ...] as segments [N, H, S, ...] for the kernels."""
    return rows.unflatten(0, (max(tile.segments, 1), -1)).transpose(1, 2)


def to_rows(x_NHSd: Tensor) -> Tensor:
    """Return segments [N, H, S, d] as rows [N * S, H, d]."""
    return x_NHSd.transpose(1, 2).flatten(0, 1)
