"""Ring attention: in round s each rank sends keys and values to the rank s places on.

T local rows, U visiting rows, H query heads, G key-value heads, d and v dims per head, W features
of a row's keys and values together.

A rank sends only the rows needed, directly to the rank that attends to them: ranks without a common
segment exchange nothing, and the owner's second piece is left out if no row of it is needed. Both
sides derive this from the lengths. The rows of the next round are sent while those of the current
one are used. Gradients of visiting rows return likewise, each rounded once to the rows' format and
summed by the owner in fp32 or wider.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import Pending, shift
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.kernels.attention.block import BackwardInputs, GradientSums, OnlineSoftmax, Tile
from moefold.layers.config import Ring
from moefold.layers.context.visibility import AttentionInputs, Visibility, VisibleRows


def attend(record: Ring, heads: AttentionInputs, world: World) -> Tensor:
    """Return ``out_THv`` of this rank's rows by ring attention over the context ranks."""
    return ring_attention(heads, world.group("cp"))


def ring_attention(heads: AttentionInputs, ranks: Group) -> Tensor:
    """Return ``out_THv``; ``ranks`` hold the micro-batch in zigzag pieces."""
    visibility = heads.visibility(ranks.size)
    return _Ring.apply(*heads[:3], heads.sinks_H, heads.scale, visibility, ranks)


class _Transfer(NamedTuple):
    """A transfer of rows in progress."""

    pending: Pending
    into_UW: Tensor


class _RingRounds:
    """The rounds of one forward or backward on this rank."""

    def __init__(
        self, k_TGd: Tensor, v_TGv: Tensor, visibility: Visibility, ranks: Group, label: str | None
    ) -> None:
        self._dims = (k_TGd.shape[1:], v_TGv.shape[1:])
        self._kv_TW = torch.cat([k_TGd.flatten(1), v_TGv.flatten(1)], 1)
        self._visibility = visibility
        self._ranks = ranks
        self._label = label

    def visible_rows(self, distance: int) -> VisibleRows:
        """Return this rank's query rows, and the rows they attend to, ``distance`` ranks back."""
        rank = self._ranks.index
        size = self._ranks.size
        return self._visibility.visible_rows(rank, (rank - distance) % size)

    def tiles(self, distance: int) -> list[Tile]:
        """Return the tiles of local queries and visiting keys from the rank ``distance`` back."""
        rank = self._ranks.index
        first = self.visible_rows(distance).keys.start
        owner = (rank - distance) % self._ranks.size
        return [tile.shift_keys(-first) for tile in self._visibility.tiles(rank, owner)]

    def sent_rows(self, distance: int) -> slice:
        """Return the local rows that the rank ``distance`` further on attends to."""
        rank = self._ranks.index
        size = self._ranks.size
        keys = self._visibility.visible_rows((rank + distance) % size, rank).keys
        return slice(keys.start, keys.stop)

    def start(self, distance: int) -> _Transfer:
        """Start the transfers of round ``distance``; a no-op after the last round."""
        if distance >= self._ranks.size:
            return _Transfer(Pending(), self._kv_TW[:0])
        rows = len(self.visible_rows(distance).keys)
        return self._shift(self._kv_TW[self.sent_rows(distance)], rows, distance)

    def return_gradients(self, distance: int, dk_UGd: Tensor, dv_UGv: Tensor) -> _Transfer:
        """Send gradients of visiting rows to their owner, and receive those of this rank's rows."""
        own = self.sent_rows(distance)
        dkv_UW = torch.cat([dk_UGd.flatten(1), dv_UGv.flatten(1)], 1)
        dkv_UW = dkv_UW.to(self._kv_TW.dtype)
        return self._shift(dkv_UW, own.stop - own.start, -distance)

    def wait(self, transfer: _Transfer) -> tuple[Tensor, Tensor]:
        """Wait for a transfer; return its keys and values, or their gradients."""
        transfer.pending.wait()
        k_dims, v_dims = self._dims
        k_UG, v_UG = transfer.into_UW.split([k_dims.numel(), v_dims.numel()], 1)
        return k_UG.unflatten(1, k_dims), v_UG.unflatten(1, v_dims)

    def _shift(self, sent_UW: Tensor, rows: int, distance: int) -> _Transfer:
        into_UW = sent_UW.new_empty((rows, sent_UW.shape[1]))
        pending = shift(sent_UW, into_UW, distance, self._ranks, self._label)
        return _Transfer(pending, into_UW)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        visibility: Visibility,
        ranks: Group,
    ) -> Tensor:
        rounds = _RingRounds(k_TGd, v_TGv, visibility, ranks, None)
        merged = OnlineSoftmax(q_THd, v_TGv.shape[-1], scale, sinks_H=sinks_H)
        transfer = rounds.start(1)
        for tile in visibility.tiles(ranks.index, ranks.index):
            merged.update(tile, k_TGd, v_TGv)
        for distance in range(1, ranks.size):
            k_UGd, v_UGv = rounds.wait(transfer)
            transfer = rounds.start(distance + 1)
            for tile in rounds.tiles(distance):
                merged.update(tile, k_UGd, v_UGv)
        out_THv = merged.out_THv.to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_TGd, v_TGv, out_THv, merged.lse_TH, sinks_H)
        ctx.scale = scale
        ctx.visibility = visibility
        ctx.ranks = ranks
        ctx.label = ranks.recorder.label
        return out_THv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THv: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGv, out_THv, lse_TH, sinks_H = ctx.saved_tensors
        rounds = _RingRounds(k_TGd, v_TGv, ctx.visibility, ctx.ranks, ctx.label)
        inputs = BackwardInputs(q_THd, out_THv, lse_TH, grad_THv, ctx.scale)
        sums = GradientSums(q_THd, k_TGd, v_TGv, lse_TH.dtype)
        transfer = rounds.start(1)
        for tile in ctx.visibility.tiles(ctx.ranks.index, ctx.ranks.index):
            dq, *dkv = inputs.gradients(tile, k_TGd, v_TGv)
            sums.add_queries(tile.queries, dq)
            sums.add_keys(tile.keys, *dkv)
        returning: _Transfer | None = None
        for distance in range(1, ctx.ranks.size):
            k_UGd, v_UGv = rounds.wait(transfer)
            transfer = rounds.start(distance + 1)
            dkv = [torch.zeros_like(x, dtype=lse_TH.dtype) for x in (k_UGd, v_UGv)]
            for tile in rounds.tiles(distance):
                dq, dk, dv = inputs.gradients(tile, k_UGd, v_UGv)
                sums.add_queries(tile.queries, dq)
                dkv[0][tile.keys] += dk
                dkv[1][tile.keys] += dv
            if returning is not None:
                sums.add_keys(rounds.sent_rows(distance - 1), *rounds.wait(returning))
            returning = rounds.return_gradients(distance, *dkv)
        if returning is not None:
            farthest = ctx.ranks.size - 1
            sums.add_keys(rounds.sent_rows(farthest), *rounds.wait(returning))
        return *sums.gradients(), inputs.sink_gradient(sinks_H), None, None, None
