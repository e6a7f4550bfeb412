"""Dispatch without any host read: room for a stated number of rows between each pair of ranks.

T rows, D hidden, K experts per token, E experts, e of them here, P ranks of ``ep``, S of ``etp``,
M rows of room for each pair, N = P * M rows sent, R = S * P * M rows after dispatch. All shapes are
known beforehand, so that a step can be captured. What does not fit is left out and counted in
``excess``, which the step looks at as it ends.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_to_all, reduce_scatter
from moefold.comm.world import World
from moefold.kernels.permute.gather import collect, spread
from moefold.moe.config import Padded
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import everyone
from moefold.moe.dispatch.hop import ranks_of
from moefold.moe.dispatch.local import permute
from moefold.moe.dispatch.order import Order, sort_copies


class PaddedDispatch(Across[Padded]):
    """Token copies over ``ep`` in equal splits."""

    def __init__(self, record: Padded, experts: int) -> None:
        super().__init__(record, experts)
        self._room = record.max_rows

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, room, entries = world.group("ep"), self._room, experts_TK.shape[1]
        each = self._experts // ep.size
        order = sort_copies(experts_TK, self._experts, complete)
        ends_Pe = order.offs_B.to(torch.int64).view(ep.size, each)
        starts_P = torch.cat([ends_Pe.new_zeros(1), ends_Pe[:-1, -1]])
        row_TK = self._rows(order, ranks_of(experts_TK, each), starts_P)
        copy_N = _inverse(row_TK, ep.size * room)
        token_N = copy_N // entries
        fitting_Pe = (ends_Pe - starts_P[:, None]).clamp(max=room)
        counts_Pe = torch.diff(fitting_Pe, dim=1, prepend=torch.zeros_like(starts_P)[:, None])
        coming = everyone(counts_Pe.flatten(), world).unflatten(2, (ep.size, each))
        slots_R = self._slots(coming[:, :, ep.index].transpose(0, 1).flatten(0, 1))
        x_RD = self._out(spread(x_TD, token_N, row_TK), world)
        p_R1 = self._out(spread(weights_TK.reshape(-1, 1), copy_N, row_TK.view(-1, 1)), world)
        here = permute(x_RD, p_R1, slots_R[:, None], each, False)
        excess = ((ends_Pe[:, -1] - starts_P) - room).clamp(min=0).amax()
        handle = (token_N, row_TK, *here.handle)
        return Dispatched(here.x_RD, here.offs_E, here.probs_R, handle, excess)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, splits = world.group("ep"), self._splits(world)
        token_N, row_TK, token_R, row_R1 = handle
        y_RD = reduce_scatter(collect(y_RD, token_R, row_R1), world.group("etp"))
        return collect(all_to_all(y_RD, ep, splits, splits), token_N, row_TK)

    def _out(self, x_ND: Tensor, world: World) -> Tensor:
        splits = self._splits(world)
        return all_gather(all_to_all(x_ND, world.group("ep"), splits, splits), world.group("etp"))

    def _splits(self, world: World) -> list[int]:
        return [self._room] * world.group("ep").size

    def _rows(self, order: Order, rank_TK: Tensor, starts_P: Tensor) -> Tensor:
        """Return where each entry's copy lies among the rows sent; N for none and for excess."""
        ranks = starts_P.shape[0]
        start_TK = torch.cat([starts_P, starts_P.new_zeros(1)])[rank_TK]
        place_TK = order.row_TK - start_TK
        fits_TK = (rank_TK < ranks) & (place_TK < self._room)
        return torch.where(fits_TK, rank_TK * self._room + place_TK, ranks * self._room)

    def _slots(self, counts_Xe: Tensor) -> Tensor:
        """Return the expert of each row that came, e for room that nothing fills."""
        ends_Xe = counts_Xe.cumsum(1)
        place_M = torch.arange(self._room, device=counts_Xe.device)
        place_XM = place_M.expand(counts_Xe.shape[0], -1).contiguous()
        return torch.searchsorted(ends_Xe, place_XM, right=True).flatten()


def _inverse(row_TK: Tensor, rows: int) -> Tensor:
    """Return the entry ``t * K + k`` that each row holds; T * K for a row that holds none."""
    entry_C = torch.arange(row_TK.numel(), device=row_TK.device)
    # One row more takes all entries that have none.
    copy_N = entry_C.new_full((rows + 1,), row_TK.numel())
    copy_N.scatter_(0, row_TK.flatten(), entry_C)
    return copy_N[:rows]
