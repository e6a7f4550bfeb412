"""Dispatch without host reads, with room for a fixed number of rows between each pair of ranks.

T rows, D hidden, K experts per token, E experts, e of them local, P ranks of ``ep``, S of ``etp``,
M rows of room for each pair, N = P * M rows sent, R = S * P * M rows after dispatch. All shapes
are fixed, so a step can be captured in a CUDA graph. Rows that do not fit are dropped and counted
in ``overflow``, which the step checks at its end.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import RowCodec, all_gather, all_to_all, reduce_scatter
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.kernels.permute.gather import permute_rows, permute_values, unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle, permute
from moefold.moe.dispatch.config import FixedShape
from moefold.moe.dispatch.routing_plan import (
    RoutedTokens,
    gather_counts,
    rank_of_expert,
    sort_copies,
)


class PaddedDispatch(Dispatcher[FixedShape]):
    """Sends token copies over ``ep`` in equal splits."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Place copies in the rows of their rank, send all rows, and sort the filled ones."""
        x_TD, weights_TK, experts_TK, no_drop = tokens
        ep = world.group("ep")
        entries = experts_TK.shape[1]
        room = self._record.rows_per_pair(ep.size)
        per_rank = self._experts // ep.size
        rows = ep.size * room
        order = sort_copies(experts_TK, self._experts, no_drop)
        ends_Pe = order.offs_B.to(torch.int64).view(ep.size, per_rank)
        starts_P = torch.cat([ends_Pe.new_zeros(1), ends_Pe[:-1, -1]])
        # Row of each entry's copy among those sent; N for "none" and overflow.
        rank_TK = rank_of_expert(experts_TK, per_rank)
        start_TK = torch.cat([starts_P, starts_P.new_zeros(1)])[rank_TK]
        place_TK = order.row_TK - start_TK
        fits_TK = (rank_TK < ep.size) & (place_TK < room)
        row_TK = torch.where(fits_TK, rank_TK * room + place_TK, rows)
        copy_N = entry_of_row(row_TK, rows)
        token_N = copy_N // entries
        capped_Pe = (ends_Pe - starts_P[:, None]).clamp(max=room)
        counts_Pe = torch.diff(capped_Pe, dim=1, prepend=torch.zeros_like(starts_P)[:, None])
        counts = gather_counts(counts_Pe.flatten(), world).unflatten(2, (ep.size, per_rank))
        # The local expert of each received row; e for an unfilled row.
        counts_SPe = counts[:, :, ep.index].transpose(0, 1)
        ends_Xe = counts_SPe.flatten(0, 1).cumsum(1)
        place_M = torch.arange(room, device=ends_Xe.device)
        place_XM = place_M.expand(ends_Xe.shape[0], -1).contiguous()
        slots_R = torch.searchsorted(ends_Xe, place_XM, right=True).flatten()
        x_RD = self._send_rows(permute_rows(x_TD, token_N, row_TK), world, self.wire)
        p_R = self._send_rows(permute_values(weights_TK, copy_N, row_TK), world)
        sent = permute(RoutedTokens(x_RD, p_R[:, None], slots_R[:, None]), per_rank)
        copies_P = ends_Pe[:, -1] - starts_P
        overflow = (copies_P - room).clamp(min=0).amax()
        return sent._replace(handle=(token_N, row_TK, *sent.handle), overflow=overflow)

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send every row back, filled or empty, and sum the results of each token."""
        token_N, row_TK, token_R, row_R1 = handle
        y_RD = unpermute_rows(y_RD, token_R, row_R1)
        y_RD = reduce_scatter(y_RD, world.group("etp"), codec=self.wire)
        y_ND = all_to_all_equal(y_RD, world.group("ep"), self.wire, combine=True)
        return unpermute_rows(y_ND, token_N, row_TK)

    def _send_rows(self, x_ND: Tensor, world: World, codec: RowCodec | None = None) -> Tensor:
        x_ND = all_to_all_equal(x_ND, world.group("ep"), codec)
        return all_gather(x_ND, world.group("etp"), codec=codec)


def all_to_all_equal(
    x_NX: Tensor, ranks: Group, codec: RowCodec | None = None, combine: bool = False
) -> Tensor:
    """Exchange rows with all ranks by an all-to-all with equal splits."""
    splits = [x_NX.shape[0] // ranks.size] * ranks.size
    return all_to_all(x_NX, ranks, splits, splits, codec, combine)


def entry_of_row(row_TK: Tensor, rows: int) -> Tensor:
    """Return the entry ``t * K + k`` that each row holds; T * K for an empty row."""
    entry_C = torch.arange(row_TK.numel(), device=row_TK.device)
    # An extra row collects all entries without a row.
    copy_N = entry_C.new_full((rows + 1,), row_TK.numel())
    copy_N.scatter_(0, row_TK.flatten(), entry_C)
    return copy_N[:rows]
