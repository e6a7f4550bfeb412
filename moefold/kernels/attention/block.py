"""Attention block by block: each row's softmax statistics are merged as blocks come.

T rows of queries, U rows of keys, H query heads, G key-value heads, d and v dims per head; in a
kernel N segments of S rows.

With ``lse`` the logarithm of a row's denominator over the keys of one block, two blocks make
``lse = log(e^lse_1 + e^lse_2)`` and ``out = out_1 e^(lse_1 - lse) + out_2 e^(lse_2 - lse)``.
Backward needs no order: given the whole row's ``out`` and ``lse``, each block gives its share.

A sink is one more logit of each head, learned, whose value is zero: it only takes weight away
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
from moefold.kernels.rows import wide_dtype

SCORES = 1 << 24
"""Scores that exist at once where the largest is looked for."""


class Band(NamedTuple):
    """A diagonal stripe: query a sees key b where ``0 <= behind + a - b < window``."""

    behind: int
    """How far the first query lies behind the first key."""
    window: int


class Tile(NamedTuple):
    """Which rows see which."""

    queries: slice
    keys: slice
    segments: int = 0
    """Queries and keys are so many segments of one length, each causal inside; with 0 every query
    sees every key."""
    band: Band | None = None
    """What a query sees of its segment where a window ends in it."""

    def moved(self, keys: int) -> "Tile":
        """Return the tile over keys that lie so many rows further on."""
        return self._replace(keys=slice(self.keys.start + keys, self.keys.stop + keys))


def causal_tiles(lengths: Iterable[int]) -> list[Tile]:
    """Return the tiles of neighbouring segments, each causal inside; equal lengths share a tile."""
    tiles, start = list[Tile](), 0
    for length, same in groupby(length for length in lengths if length):
        count = len(list(same))
        end = start + length * count
        tiles.append(Tile(slice(start, end), slice(start, end), count))
        start = end
    return tiles


def choose(tile: Tile, q_NHSd: Tensor, v_NGUv: Tensor) -> tuple[ModuleType, tuple[Any, ...]]:
    """Return the kernels for a tile's queries and values, and what they are told of its sight.

    Fused ones where they fit; bands are written out.
    """
    if tile.band is not None:
        return block_plain, (False, tile.band)
    kernel = block_fused if block_fused.fits(q_NHSd, v_NGUv) else block_plain
    return kernel, (tile.segments > 0,)


class OnlineSoftmax:
    """What rows have seen so far; a row that has seen nothing gives zeros."""

    def __init__(
        self, q_THd: Tensor, v_dim: int, scale: float, sinks_H: Tensor | None = None
    ) -> None:
        """Begin with nothing seen but each head's sink, in fp32 or wider."""
        wide = wide_dtype(q_THd)
        self._q_THd, self._scale = q_THd, scale
        self.out_THv = q_THd.new_zeros((*q_THd.shape[:2], v_dim), dtype=wide)
        self.lse_TH = q_THd.new_full(q_THd.shape[:2], float("-inf"), dtype=wide)
        if sinks_H is not None:
            self.lse_TH.copy_(sinks_H)

    def see(self, tile: Tile, k_UGd: Tensor, v_UGv: Tensor) -> None:
        """Let the tile's queries see its keys."""
        q, k, v = _of_kernel(tile, self._q_THd, k_UGd, v_UGv)
        kernel, sight = choose(tile, q, v)
        part, lse = kernel.forward(q, k, v, self._scale, *sight)
        out_SHv, lse_SH = self.out_THv[tile.queries], self.lse_TH[tile.queries]
        lse = lse.transpose(1, 2).flatten(0, 1)
        merged_SH = torch.logaddexp(lse_SH, lse)
        # A row that has seen nothing yet has no statistics to come from.
        base_SH = merged_SH.masked_fill(merged_SH == float("-inf"), 0.0)
        out_SHv.mul_((lse_SH - base_SH).exp_()[..., None])
        out_SHv.add_(rows_of(part) * (lse - base_SH).exp_()[..., None])
        lse_SH.copy_(merged_SH)


class Seen(NamedTuple):
    """What backward knows of rows: queries, outputs, statistics, and the outputs' gradient."""

    q_THd: Tensor
    out_THv: Tensor
    lse_TH: Tensor
    grad_THv: Tensor
    scale: float

    def gradients(self, tile: Tile, k_UGd: Tensor, v_UGv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shares of one tile: of its queries' rows, its keys' and its values'."""
        q, k, v = _of_kernel(tile, self.q_THd, k_UGd, v_UGv)
        grad, out = (segments_of(x[tile.queries], tile) for x in (self.grad_THv, self.out_THv))
        lse_NHS = segments_of(self.lse_TH[tile.queries], tile)
        kernel, sight = choose(tile, q, v)
        shares = kernel.backward(grad, q, k, v, out, lse_NHS, self.scale, *sight)
        return tuple(rows_of(x) for x in shares)  # type: ignore[return-value]

    def sink_gradient(self, sinks_H: Tensor | None) -> Tensor | None:
        """Return the gradient of sinks: each takes its weight times what the row's output gives."""
        if sinks_H is None:
            return None
        weights_TH = (sinks_H.to(self.lse_TH.dtype) - self.lse_TH).exp()
        towards_TH = (self.grad_THv.to(self.lse_TH.dtype) * self.out_THv).sum(-1)
        return -(weights_TH * towards_TH).sum(0).to(sinks_H.dtype)


class Sums:
    """Gradients as the tiles' shares are added to them, in the statistics' format."""

    def __init__(self, q_THd: Tensor, k_UGd: Tensor, v_UGv: Tensor, dtype: torch.dtype) -> None:
        """Begin with zeros."""
        self._dtype = q_THd.dtype
        self._sums = [torch.zeros_like(x, dtype=dtype) for x in (q_THd, k_UGd, v_UGv)]

    def add_queries(self, rows: slice, dq: Tensor) -> None:
        """Add a share to rows of the queries."""
        self._sums[0][rows] += dq

    def add_keys(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add shares to rows of the keys and values."""
        self._sums[1][rows] += dk
        self._sums[2][rows] += dv

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values in their own format."""
        dq, dk, dv = (total.to(self._dtype) for total in self._sums)
        return dq, dk, dv


class _Tiled(Function):
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
        merged = OnlineSoftmax(q_THd, v_UGv.shape[-1], scale, sinks_H)
        for tile in tiles:
            merged.see(tile, k_UGd, v_UGv)
        out_THv = merged.out_THv.to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_UGd, v_UGv, out_THv, merged.lse_TH, sinks_H)
        ctx.tiles, ctx.scale = tiles, scale
        return out_THv

    @staticmethod
    def backward(ctx: Any, grad_THv: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_UGd, v_UGv, out_THv, lse_TH, sinks_H = ctx.saved_tensors
        seen = Seen(q_THd, out_THv, lse_TH, grad_THv, ctx.scale)
        sums = Sums(q_THd, k_UGd, v_UGv, lse_TH.dtype)
        for tile in ctx.tiles:
            dq, dk, dv = seen.gradients(tile, k_UGd, v_UGv)
            sums.add_queries(tile.queries, dq)
            sums.add_keys(tile.keys, dk, dv)
        return *sums.gradients(), seen.sink_gradient(sinks_H), None, None


def attention(
    q_THd: Tensor,
    k_UGd: Tensor,
    v_UGv: Tensor,
    tiles: Sequence[Tile],
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv``: each row sees the keys that the tiles say; a row of no tile gives zeros.

    Args:
        q_THd: queries.
        k_UGd: keys; the rows may be others than the queries'.
        v_UGv: their values.
        tiles: who sees whom, each pair of rows at most once.
        scale: factor on the scores.
        sinks_H: a logit of each head that takes weight and gives nothing.
    """
    args = (q_THd, k_UGd, v_UGv, sinks_H, tuple(tiles), scale)
    return _Tiled.apply(*args)  # type: ignore[return-value]


@torch.no_grad()
def largest_logits(q_THd: Tensor, k_UGd: Tensor, tiles: Sequence[Tile], scale: float) -> Tensor:
    """Return [H] in fp32 or wider; zero where every logit is below, and of heads that see nothing.

    Scores are computed once more, some queries at a time: fused attention does not tell.
    """
    largest_H = q_THd.new_zeros(q_THd.shape[1], dtype=wide_dtype(q_THd))
    for tile in tiles:
        q, k = (segments_of(x, tile) for x in (q_THd[tile.queries], k_UGd[tile.keys]))
        q, k, _ = block_plain.alike(q, k, k, largest_H.dtype)
        count, keys = q.shape[2], k.shape[2]
        rows = max(1, SCORES // (q.shape[0] * q.shape[1] * keys))
        behind, window = tile.band or (0, count)
        hides = tile.band is not None or tile.segments > 0
        for start in range(0, count, rows):
            band = (behind + start, window) if hides else None
            part = block_plain.scores(q[:, :, start : start + rows], k, scale, False, band)
            largest_H = torch.maximum(largest_H, part.amax((0, 2, 3)))
    return largest_H


def _of_kernel(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = q[tile.queries], k[tile.keys], v[tile.keys]
    return segments_of(q, tile), segments_of(k, tile), segments_of(v, tile)


def segments_of(rows: Tensor, tile: Tile) -> Tensor:
    """Turn a tile's rows [N * S, H, ...] into segments [N, H, S, ...], as the kernels take them."""
    return rows.unflatten(0, (max(tile.segments, 1), -1)).transpose(1, 2)


def rows_of(x_NHSd: Tensor) -> Tensor:
    """Turn segments [N, H, S, d] into rows [N * S, H, d] again."""
    return x_NHSd.transpose(1, 2).flatten(0, 1)
