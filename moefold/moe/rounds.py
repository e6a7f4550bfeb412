"""A mixture's exchanges and experts in rounds, in none of which a rank has more rows than stated.

This is how a step is made whose rows had no place in a dispatch of fixed room: by ``alltoall``,
which is exact and has no bound, some rows at a time. All copies for a rank stand in one line, by
sender and then by expert, and a round takes the next piece of it. Each round but a lone one is made
again in backward, so that the rows of one are there at a time; a lone one too where what is kept
has pages, which may be what lacked.

T rows, D hidden, K experts per token, E experts, P ranks of ``ep``, X ranks that send to them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moefold.comm.world import World
from moefold.kernels.gradients import AtOnce, Deferred
from moefold.layers.flow import Flow
from moefold.moe.dispatch.alltoall import AllToAllDispatch
from moefold.moe.dispatch.base import Dispatched
from moefold.moe.dispatch.config import AllToAll, FixedRoom
from moefold.moe.dispatch.routing_plan import (
    RoutedTokens,
    gather_counts,
    host_counts,
    rank_of_expert,
    sort_copies,
)

RunExperts = Callable[[Dispatched, Flow], Tensor]
"""``run(sent, flow)``: the results of the rows that came."""


class Rounds:
    """The second try of a layer, of some name, whose dispatcher has fixed room."""

    def __init__(self, record: FixedRoom, experts: int, name: str) -> None:
        self._record, self._experts, self._name = record, experts, name
        self._way = AllToAllDispatch(AllToAll(), experts)

    def wanted(self, flow: Flow) -> bool:
        """Return whether a pass goes in rounds."""
        return flow.exact and flow.world.group("tp_ep").size > 1

    def run(self, tokens: RoutedTokens, experts: RunExperts, flow: Flow) -> Tensor:
        """Return the sum of each token's copies [T, D]."""
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            round_TK, rounds = self._turns(tokens.experts_TK, flow.world)
        if rounds == 1 and not flow.keeper.bounded:
            return self._round(tokens, experts, flow)
        # Products that wait would hold the rows of all rounds.
        sink = AtOnce(flow.sink) if isinstance(flow.sink, Deferred) else flow.sink
        flow = replace(flow, sink=sink)

        def one(x_TD: Tensor, weights_TK: Tensor, number: int) -> Tensor:
            now_TK = round_TK == number
            experts_TK = torch.where(now_TK, tokens.experts_TK, self._experts)
            sent = RoutedTokens(x_TD, torch.where(now_TK, weights_TK, 0), experts_TK)
            return self._round(sent, experts, flow)

        out_TD: Tensor | None = None
        for number in range(rounds):
            part_TD = checkpoint(
                one, *tokens[:2], number, use_reentrant=False, preserve_rng_state=False
            )
            out_TD = part_TD if out_TD is None else out_TD + part_TD
        assert out_TD is not None
        return out_TD

    def _round(self, tokens: RoutedTokens, experts: RunExperts, flow: Flow) -> Tensor:
        world, module = flow.world, flow.world.recorder.module
        with module(f"{self._name}.dispatch"):
            sent = self._way.dispatch(*tokens, world)
        y_RD = experts(sent, flow)
        with module(f"{self._name}.combine"):
            return self._way.combine(y_RD, sent.handle, tokens.no_drop, world)

    def _turns(self, experts_TK: Tensor, world: World) -> tuple[Tensor, int]:
        """Exchange counts, and lay this rank's copies into rounds.

        Returns:
            The round that sends each copy, any of one that goes nowhere; and how many there are, on
            all ranks that exchange rows alike.
        """
        room, ranks = self._record.filled(world.folding.sizes), world.group("ep").size
        per_rank = self._experts // ranks
        order = sort_copies(experts_TK, self._experts)
        ends_P = order.offs_B.to(torch.int64)[per_rank - 1 :: per_rank]
        starts_P = torch.cat([ends_P.new_zeros(1), ends_P[:-1]])
        counts_XP = gather_counts(ends_P - starts_P, world).flatten(0, 1)
        before_P = counts_XP[: world.group("tp_ep").index].sum(0) - starts_P
        before_P = torch.cat([before_P, before_P.new_zeros(1)])  # of copies that go nowhere
        place_TK = order.row_TK + before_P[rank_of_expert(experts_TK, per_rank)]
        (most,) = host_counts(counts_XP.sum(0).amax()[None])()
        return place_TK.div(room, rounding_mode="floor"), max(1, -(-most // room))
