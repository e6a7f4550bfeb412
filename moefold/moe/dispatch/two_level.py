"""De-duplicated dispatch in two hops: once to each node, then once to each rank there.

T rows, D hidden, K experts per token, E experts, R rows after dispatch, P ranks of ``ep``, S of
``etp``; N nodes of I ranks each. A row is sent to the rank of equal index on the other node, which
forwards it within the node: a token crosses slow links once per node.
"""

from functools import partial

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.world import World
from moefold.kernels.permute.gather import unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Dispatcher, Handle, permute
from moefold.moe.dispatch.config import TwoLevel
from moefold.moe.dispatch.routing_plan import (
    ExchangePlan,
    RoutedTokens,
    distinct_ranks,
    gather_counts,
    host_counts,
    pack,
    rank_of_expert,
    sort_tokens,
)
from moefold.moe.topk import count


class TwoLevelDispatch(Dispatcher[TwoLevel]):
    """Sends tokens over the nodes of ``ep``, then over the ranks of a node."""

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Exchange the counts of both hops; send rows by node, then by rank; sort them there."""
        inside, across = world.split("ep", self._record.node)
        etp = world.group("etp")
        per_rank = self._experts // world.group("ep").size
        per_node = per_rank * inside.size
        order, node_TK = sort_tokens(tokens, per_node, across.size)
        counts = self._counts(order.counts_B, tokens.experts_TK, per_rank, world)
        *numbers, copies = host_counts(counts)()
        nodes = across.size
        ranks = inside.size
        send = numbers[:nodes]
        receive = numbers[nodes : 2 * nodes]
        second = numbers[2 * nodes :]
        plan = ExchangePlan.of(second[:ranks], second[ranks:], etp)
        order = order.first(sum(send))
        packed = pack(tokens, order, node_TK, per_node)
        hop = partial(all_to_all, group=across, send=send, receive=receive)
        relayed = self.exchange_tokens(packed, hop)
        onward, rank_NK = sort_tokens(relayed, per_rank, ranks)
        onward = onward.first(sum(plan.send))
        packed = pack(relayed, onward, rank_NK, per_rank)
        received = self.exchange_tokens(packed, partial(plan.send_rows, group=inside, etp=etp))
        sent = permute(received, per_rank, copies)
        orders = (order.token_R, order.row_TK, onward.token_R, onward.row_TK)
        return sent._replace(handle=(*orders, *sent.handle, send, receive, plan))

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Sum a token's results on each expert rank, on each node, then on its own rank."""
        inside, across = world.split("ep", self._record.node)
        token_T, row_T, token_N, row_N, token_R, row_R, send, receive, plan = handle
        y_RD = unpermute_rows(y_RD, token_R, row_R)
        etp = world.group("etp")
        wire = self.wire
        y_ND = plan.return_rows(y_RD, inside, etp, wire)
        y_ND = unpermute_rows(y_ND, token_N, row_N)
        y_ND = all_to_all(y_ND, across, receive, send, wire, combine=True)
        return unpermute_rows(y_ND, token_T, row_T)

    def _counts(self, nodes_N: Tensor, experts_TK: Tensor, per_rank: int, world: World) -> Tensor:
        """Return rows to and from each node, to and from each rank of this node, and copies.

        What a rank forwards depends on rows that it has yet to receive, so all ranks first
        exchange how many of their tokens need each node and each rank.
        """
        inside, across = world.split("ep", self._record.node)
        ep = world.group("ep")
        etp = world.group("etp")
        node = across.index
        place = inside.index
        rank_TK = rank_of_expert(experts_TK, per_rank)
        ranks_P = count(distinct_ranks(rank_TK, ep.size), ep.size)
        counts = gather_counts(torch.cat([nodes_N, ranks_P, count(rank_TK, ep.size)]), world)
        nodes_PSN, ranks_PSP, copies_PSP = counts.split([across.size, ep.size, ep.size], 2)
        level = (across.size, inside.size)
        nodes_NISN = nodes_PSN.unflatten(0, level)
        local_NISI = ranks_PSP.unflatten(0, level).unflatten(3, level)[:, :, :, node]
        from_nodes_N = nodes_NISN[:, place, etp.index, node]
        to_ranks_I = local_NISI[:, place, etp.index].sum(0)
        from_ranks_SI = local_NISI[..., place].sum(0).t()
        copies = copies_PSP[:, :, ep.index].sum()
        return torch.cat([nodes_N, from_nodes_N, to_ranks_I, from_ranks_SI.flatten(), copies[None]])
