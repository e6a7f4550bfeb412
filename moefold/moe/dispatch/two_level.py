"""De-duplicated dispatch in two hops: once to each node, and there once to each rank.

T rows, D hidden, K experts per token, E experts, R rows after dispatch, P ranks of ``ep``, S of
``etp``; N nodes of I ranks each. A row crosses to the rank of its place on the other node, which
hands it on, so that a token crosses the slow links once per node, whatever its experts there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.kernels.permute.gather import collect
from moefold.moe.config import TwoLevel
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import Plan, everyone, host_counts
from moefold.moe.dispatch.hop import Parcel, address, distinct, packed, ranks_of
from moefold.moe.dispatch.local import permute
from moefold.moe.router import count


class TwoLevelDispatch(Across[TwoLevel]):
    """Tokens over the nodes of ``ep``, then over the ranks of a node."""

    def __init__(self, record: TwoLevel, experts: int) -> None:
        super().__init__(record, experts)
        self._node = record.node

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`."""
        inside, across = world.split("ep", self._node)
        each = self._experts // world.group("ep").size
        parcel = Parcel(x_TD, weights_TK, experts_TK)
        order, node_TK = address(parcel, each * inside.size, across.size)
        numbers = host_counts(self._counts(order.counts_B, experts_TK, each, world))
        hops = _Hops.of(numbers, across, inside, world.group("etp"))
        order = order.first(sum(hops.send))
        sent = packed(parcel, order, node_TK, each * inside.size)
        relayed = Parcel(*(all_to_all(part, across, hops.send, hops.receive) for part in sent))
        second, rank_NK = address(relayed, each, inside.size)
        second = second.first(sum(hops.plan.send))
        sent = packed(relayed, second, rank_NK, each)
        arrived = Parcel(*(hops.plan.out(part, inside, world.group("etp")) for part in sent))
        here = permute(*arrived, each, False, numbers[-1])
        orders = (order.token_R, order.row_TK, second.token_R, second.row_TK)
        handle = (*orders, *here.handle, numbers)
        return Dispatched(here.x_RD, here.offs_E, here.probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        inside, across = world.split("ep", self._node)
        etp = world.group("etp")
        token_T, row_T, token_N, row_N, token_R, row_R, numbers = handle
        hops = _Hops.of(numbers, across, inside, etp)
        y_ND = hops.plan.back(collect(y_RD, token_R, row_R), inside, etp)
        y_ND = all_to_all(collect(y_ND, token_N, row_N), across, hops.receive, hops.send)
        return collect(y_ND, token_T, row_T)

    def _counts(self, nodes_N: Tensor, experts_TK: Tensor, each: int, world: World) -> Tensor:
        """Return the numbers of both hops, of which ``_Hops`` reads its own.

        What a rank hands on depends on rows that have yet to come to it, so all ranks tell each
        other beforehand how many of their tokens need which node and which rank.
        """
        inside, across = world.split("ep", self._node)
        ep, etp, node, place = world.group("ep"), world.group("etp"), across.index, inside.index
        rank_TK = ranks_of(experts_TK, each)
        ranks_P = count(distinct(rank_TK, ep.size), ep.size)
        told = everyone(torch.cat([nodes_N, ranks_P, count(rank_TK, ep.size)]), world)
        nodes_PSN, ranks_PSP, copies_PSP = told.split([across.size, ep.size, ep.size], 2)
        level = (across.size, inside.size)
        nodes_NISN = nodes_PSN.unflatten(0, level)
        mine_NISI = ranks_PSP.unflatten(0, level).unflatten(3, level)[:, :, :, node]
        return torch.cat(
            [
                nodes_N,
                nodes_NISN[:, place, etp.index, node],
                mine_NISI[:, place, etp.index].sum(0),
                mine_NISI[..., place].sum(0).t().flatten(),
                copies_PSP[:, :, ep.index].sum()[None],
            ]
        )


class _Hops(NamedTuple):
    """Rows for and from each node, and what follows inside the node."""

    send: list[int]
    receive: list[int]
    plan: Plan

    @classmethod
    def of(cls, numbers: list[int], across: Group, inside: Group, etp: Group) -> "_Hops":
        """Read both hops from counts; the last of them is the number of copies."""
        nodes, ranks = across.size, inside.size
        second = numbers[2 * nodes : -1]
        plan = Plan.of(second[:ranks], second[ranks:], etp.index)
        return cls(numbers[:nodes], numbers[nodes : 2 * nodes], plan)
