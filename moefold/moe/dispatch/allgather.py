"""Dispatch by all-gather: each rank selects the copies for its own experts from all rows.

T local rows, A rows of all ranks, D hidden, K experts per token, E experts, R rows after dispatch,
P ranks of ``ep``, S of ``etp``. Each token is sent to every rank: useful if K is near P or larger.
"""

from functools import partial

import torch
from torch import Tensor

from moefold.comm.collectives import gather_rows, scatter_rows
from moefold.comm.world import World
from moefold.kernels.permute.gather import unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle, permute
from moefold.moe.dispatch.config import AllGather
from moefold.moe.dispatch.routing_plan import (
    RoutedTokens,
    gather_counts,
    host_counts,
    rank_of_expert,
)
from moefold.moe.topk import count


class AllGatherDispatch(Dispatcher[AllGather]):
    """Gathers all rows on all ranks of ``ep`` and ``etp``; results return by reduce-scatter."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Gather counts and all rows, and sort the copies for local experts."""
        ranks = world.group("tp_ep")
        ep = world.group("ep")
        per_rank = self._experts // ep.size
        copies_P = count(rank_of_expert(tokens.experts_TK, per_rank), ep.size)
        rows_1 = copies_P.new_full((1,), tokens.x_TD.shape[0])
        counts_PSC = gather_counts(torch.cat([rows_1, copies_P]), world)
        rows_PS = counts_PSC[..., 0]
        copies_PS = counts_PSC[..., 1 + ep.index]
        counts = torch.cat([rows_PS.flatten(), copies_PS.sum()[None]])
        *rows, copies = host_counts(counts)()
        gathered = self.exchange_tokens(tokens, partial(gather_rows, group=ranks, counts=rows))
        slots_AK = gathered.experts_TK - ep.index * per_rank
        local_AK = (slots_AK >= 0) & (slots_AK < per_rank)
        slots_AK = torch.where(local_AK, slots_AK, per_rank)
        sent = permute(gathered._replace(experts_TK=slots_AK), per_rank, copies)
        return sent._replace(handle=(*sent.handle, rows))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Sum results by token locally, then over ranks; return this rank's rows."""
        token_R, row_AK, rows = handle
        y_AD = unpermute_rows(y_RD, token_R, row_AK)
        return scatter_rows(y_AD, world.group("tp_ep"), rows, self.wire)
