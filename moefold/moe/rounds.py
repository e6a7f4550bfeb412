"""Dispatch, experts and combine of an MoE layer in rounds of bounded size.

A step that overflowed a fixed-shape dispatcher is repeated this way: by ``alltoall``, which is
exact and unbounded, with at most ``max_rows`` per rank at a time. The copies for a rank are ordered
by sender and then by expert, and each round takes the next ones. Rounds are recomputed in backward,
so memory holds the rows of only one. A single round is not recomputed, unless saved rows are in
pages, of which the step may have run out.

T rows, D hidden, K experts per token, E experts, P ranks of ``ep``, X ranks that send to them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moefold.comm.world import World
from moefold.kernels.gradients import DeferredSink, EagerSink
from moefold.layers.flow import Flow
from moefold.moe.dispatch.alltoall import AllToAllDispatch
from moefold.moe.dispatch.base import Dispatched
from moefold.moe.dispatch.config import AllToAll, FixedShape
from moefold.moe.dispatch.routing_plan import (
    RoutedTokens,
    gather_counts,
    host_counts,
    rank_of_expert,
    sort_copies,
)

RunExperts = Callable[[Dispatched, Flow], Tensor]
"""``run(sent, flow)`` returns the experts' results for dispatched rows."""


class Rounds:
    """Repeats the layer ``name``, whose dispatcher has fixed shapes, in rounds."""

    def __init__(self, record: FixedShape, experts: int, name: str) -> None:
        self._record = record
        self._experts = experts
        self._name = name
        self._dispatcher = AllToAllDispatch(AllToAll(), experts)

    def run(self, tokens: RoutedTokens, experts: RunExperts, flow: Flow) -> Tensor:
        """Return the sum [T, D] of the results of each token's copies."""
        with flow.world.recorder.module(f"{self._name}.dispatch"):
            round_TK, rounds = self._assign_rounds(tokens.experts_TK, flow.world)
        if rounds == 1 and not flow.saved_tensors.uses_pages:
            return self._round(tokens, experts, flow)
        # Deferred weight gradients would hold the rows of all rounds.
        sink = EagerSink(flow.sink) if isinstance(flow.sink, DeferredSink) else flow.sink
        flow = replace(flow, sink=sink)

        def step(x_TD: Tensor, weights_TK: Tensor, number: int) -> Tensor:
            in_round_TK = round_TK == number
            experts_TK = torch.where(in_round_TK, tokens.experts_TK, self._experts)
            sent = RoutedTokens(x_TD, torch.where(in_round_TK, weights_TK, 0), experts_TK)
            return self._round(sent, experts, flow)

        out_TD: Tensor | None = None
        for number in range(rounds):
            part_TD = checkpoint(
                step, *tokens[:2], number, use_reentrant=False, preserve_rng_state=False
            )
            out_TD = part_TD if out_TD is None else out_TD + part_TD
        assert out_TD is not None
        return out_TD

    def _round(self, tokens: RoutedTokens, experts: RunExperts, flow: Flow) -> Tensor:
        world = flow.world
        module = flow.world.recorder.module
        with module(f"{self._name}.dispatch"):
            sent = self._dispatcher.dispatch(*tokens, world)
        y_RD = experts(sent, flow)
        with module(f"{self._name}.combine"):
            return self._dispatcher.combine(y_RD, sent.handle, tokens.no_drop, world)

    def _assign_rounds(self, experts_TK: Tensor, world: World) -> tuple[Tensor, int]:
        """Exchange counts and assign this rank's copies to rounds.

        Returns:
            The round [T, K] of each copy (arbitrary for copies that are not sent), and the number
            of rounds, equal on all ranks that exchange rows.
        """
        limit = self._record.max_rows_received(world.folding.sizes)
        ranks = world.group("ep").size
        per_rank = self._experts // ranks
        order = sort_copies(experts_TK, self._experts)
        ends_P = order.offs_B.to(torch.int64)[per_rank - 1 :: per_rank]
        starts_P = torch.cat([ends_P.new_zeros(1), ends_P[:-1]])
        counts_XP = gather_counts(ends_P - starts_P, world).flatten(0, 1)
        before_P = counts_XP[: world.group("tp_ep").index].sum(0) - starts_P
        before_P = torch.cat([before_P, before_P.new_zeros(1)])  # for copies that are not sent
        place_TK = order.row_TK + before_P[rank_of_expert(experts_TK, per_rank)]
        (most,) = host_counts(counts_XP.sum(0).amax()[None])()
        return place_TK.div(limit, rounding_mode="floor"), max(1, -(-most // limit))
