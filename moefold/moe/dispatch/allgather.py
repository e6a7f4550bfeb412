"""Dispatch by gathering all rows: each rank takes from them the copies of its own experts.

T rows here, A of all ranks, D hidden, K experts per token, E experts, R rows after dispatch, P
ranks of ``ep``, S of ``etp``. It sends each token to every rank and so pays where K is near P or
above.
"""

import torch
from torch import Tensor

from moefold.comm.collectives import gather_rows, scatter_rows
from moefold.comm.world import World
from moefold.kernels.permute.gather import collect
from moefold.moe.config import AllGather
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import everyone, host_counts
from moefold.moe.dispatch.hop import ranks_of
from moefold.moe.dispatch.local import permute
from moefold.moe.router import count


class AllGatherDispatch(Across[AllGather]):
    """All rows to all ranks of ``ep`` and ``etp``; sums come back by reduce-scatter."""

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`."""
        ranks = world.group("tp_ep")
        ep = world.group("ep")
        each = self._experts // ep.size
        copies_P = count(ranks_of(experts_TK, each), ep.size)
        told_PSC = everyone(torch.cat([copies_P.new_full((1,), x_TD.shape[0]), copies_P]), world)
        rows_PS, copies_PS = told_PSC[..., 0], told_PSC[..., 1 + ep.index]
        *rows, copies = host_counts(torch.cat([rows_PS.flatten(), copies_PS.sum()[None]]))
        parts = (x_TD, weights_TK, experts_TK)
        x_AD, weights_AK, experts_AK = (gather_rows(part, ranks, rows) for part in parts)
        slots_AK = experts_AK - ep.index * each
        here_AK = (slots_AK >= 0) & (slots_AK < each)
        slots_AK = torch.where(here_AK, slots_AK, each)
        here = permute(x_AD, weights_AK, slots_AK, each, False, copies)
        handle = (*here.handle, rows)
        return Dispatched(here.x_RD, here.offs_E, here.probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        ranks = world.group("tp_ep")
        token_R, row_AK, rows = handle
        return scatter_rows(collect(y_RD, token_R, row_AK), ranks, rows)
