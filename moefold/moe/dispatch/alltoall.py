"""Dispatch by one all-to-all over the expert-parallel group.

T rows, D hidden, K experts per token, E experts, e of them local, R rows after dispatch, N rows
sent, P ranks of ``ep``, S of ``etp``. Ranks of ``etp`` hold slices of the same experts: each needs
the rows that any of them receives, and their results are summed.
"""

from functools import partial

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.permute.gather import unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle, permute, sort_rows
from moefold.moe.dispatch.config import AllToAll, AllToAllOnce
from moefold.moe.dispatch.routing_plan import (
    ExchangePlan,
    RoutedTokens,
    exchange_counts,
    gather_counts,
    host_counts,
    pack,
    rank_of_expert,
    sort_copies,
    sort_received,
    sort_tokens,
)
from moefold.moe.topk import count


class AllToAllDispatch(Dispatcher[AllToAll]):
    """Sends each copy of a token to the rank of its expert."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Exchange counts, then copies; sort the received copies by expert."""
        x_TD, weights_TK, experts_TK, no_drop = tokens
        ep = world.group("ep")
        etp = world.group("etp")
        order = sort_copies(experts_TK, self._experts, no_drop)
        counts, incoming_Xe = exchange_counts(order, world)
        read_counts = host_counts(counts)
        if not no_drop:
            order = order.first(sum(read_counts()[: ep.size]))
        # Without drops, copies are sorted before the host knows the split sizes.
        x_RD = order.rows(x_TD, no_drop)
        p_R = order.entries(weights_TK, no_drop)
        numbers = read_counts()
        plan = ExchangePlan.of(numbers[: ep.size], numbers[ep.size :], etp)
        x_RD = plan.send_rows(x_RD, ep, etp, self.wire)
        p_R = plan.send_rows(p_R, ep, etp)
        by_expert = sort_received(incoming_Xe, sum(plan.slices))
        sent = sort_rows(x_RD, p_R[:, None], by_expert, no_drop=True)
        return sent._replace(handle=(order.token_R, order.row_TK, *sent.handle, plan))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send each copy's result back, and sum the results of each token."""
        token_N, row_TK, token_R, row_R1, plan = handle
        y_RD = unpermute_rows(y_RD, token_R, row_R1, True)
        y_ND = plan.return_rows(y_RD, world.group("ep"), world.group("etp"), self.wire)
        return unpermute_rows(y_ND, token_N, row_TK, no_drop)


class DeduplicatedDispatch(Dispatcher[AllToAllOnce]):
    """Sends a token once to each rank with any of its experts; copies are made there.

    The number of rows sent is exactly the sum over tokens of their distinct ranks.
    """

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Exchange counts of rows and copies, then rows; copy and sort the received rows."""
        ep = world.group("ep")
        etp = world.group("etp")
        per_rank = self._experts // ep.size
        order, rank_TK = sort_tokens(tokens, per_rank, ep.size)
        copies_P = count(rank_of_expert(tokens.experts_TK, per_rank), ep.size)
        counts = gather_counts(torch.cat([order.counts_B, copies_P]), world)
        counts_PS2P = counts.unflatten(2, (2, -1))
        rows_PS, copies_PS = counts_PS2P[..., ep.index].unbind(2)
        parts = [order.counts_B, rows_PS.t().flatten(), copies_PS.sum()[None]]
        *numbers, copies = host_counts(torch.cat(parts))()
        plan = ExchangePlan.of(numbers[: ep.size], numbers[ep.size :], etp)
        order = order.first(sum(plan.send))
        packed = pack(tokens, order, rank_TK, per_rank)
        received = self.exchange_tokens(packed, partial(plan.send_rows, group=ep, etp=etp))
        sent = permute(received, per_rank, copies)
        return sent._replace(handle=(order.token_R, order.row_TK, *sent.handle, plan))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Sum a token's results on each expert rank, send the sums back, and add them up."""
        token_N, row_TK, token_R, row_NK, plan = handle
        y_RD = unpermute_rows(y_RD, token_R, row_NK)
        y_ND = plan.return_rows(y_RD, world.group("ep"), world.group("etp"), self.wire)
        return unpermute_rows(y_ND, token_N, row_TK)
