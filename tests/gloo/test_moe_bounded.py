"""Rows on any rank are those that its room is stated for, whatever is routed: in no layout more."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.moe.clones import quotas
from moefold.moe.dispatch.config import Clones, FixedShape, LocalExperts, Padded, Spread
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.layer_dispatch import LayerDispatch
from tests.cpu.small import padded_rows
from tests.gloo.dispatching import (
    E,
    F,
    expert_weights,
    joined,
    open_world,
    run_experts,
    sources,
    there_and_back,
)
from tests.gloo.harness import run_ranks
from tests.gloo.test_moe_rounds import ROUTINGS, ROWS, uneven

FEW: tuple[tuple[str, int, str, int], ...] = (("ep2 etp2", 4, "spread", 2),)
"""Sizes, ranks, ways, and slots for clones."""
MORE = tuple(
    (sizes, ranks, way, slots)
    for (sizes, ranks), (way, slots) in product(
        (("ep2", 2), ("ep4", 4), ("ep2 etp2", 4), ("etp2 ep4", 8), ("ep2 etp4", 8), ("ep8", 8)),
        (("padded", 0), ("spread", 0), *product(("padded", "spread"), (1, 2, 4))),
    )
    if (sizes, ranks, way, slots) not in FEW and slots <= E - E // int(sizes.split("ep")[1][0])
)


class Came(NamedTuple):
    """What came of a routing on one rank."""

    error: float
    rows: int
    """That experts were given, filled or not."""
    filled: int
    stated: int
    """That the planner counts."""
    bound: int
    excess: int


def room_for(way: str, counts_XE: Tensor, world: World, clones: Clones | None) -> FixedShape:
    """Return a record with the least room that a routing needs."""
    ep, etp = world.group("ep").size, world.group("etp").size
    counts_E = counts_XE.sum(0)
    after_P = counts_E.view(ep, -1).sum(1)
    if clones is not None:
        after_P = quotas(counts_E, ep, clones).sum(0)
    if way == "spread":
        return Spread(max_rows=int(max(after_P.max(), counts_XE.sum(1).max())))
    return Padded(max_rows=int(min(after_P.max(), counts_XE.sum(1).max())) or etp)


class Given:
    """Experts and clones that note the rows they are given, and those that are filled."""

    def __init__(self, world: World) -> None:
        self.ep, self.etp, self.rows = world.group("ep"), world.group("etp"), (0, 0)

    def __call__(
        self, x_RD: Tensor, offs_E: Tensor, probs_R: Tensor, flow: Flow, _: None, at: Tensor | None
    ) -> Tensor:
        """Run those that are here."""
        self.rows = x_RD.shape[0], int(offs_E[-1])
        ids = torch.arange(E).view(self.ep.size, -1)[self.ep.index]
        ids = ids if at is None else torch.cat([ids, at[self.ep.index].clamp(max=E - 1)])
        part = torch.arange(F).tensor_split(self.etp.size)[self.etp.index]
        w_in, w_out = expert_weights()
        return run_experts(x_RD, offs_E, probs_R, w_in[ids][:, part], w_out[ids][:, :, part])


def came(rank: int, sizes: str, ranks: int, way: str, slots: int) -> dict[str, Came]:
    """Send every routing there and back with the least room that is stated for it."""
    world, found = open_world(sizes, ranks), {}
    clones = Clones(slots=slots) if slots else None
    senders, ep = sources(world), world.group("ep")
    # One pass: what an earlier layer lacked is not forgotten by a later one.
    flow = Flow(padded_rows((ROWS,), 0), PrecisionPolicy("fp64"), world=world)
    for routing in ROUTINGS:
        parts = [uneven(routing, one) for one in senders]
        whole = there_and_back(LocalExperts(), joined(parts), *expert_weights())
        counts_XE = torch.stack(
            [one.experts_TK.flatten().bincount(minlength=E + 1)[:E] for one in parts]
        )
        record: Record = room_for(way, counts_XE, world, clones)
        place = senders.index(world.rank)
        mine = parts[place]
        sending = LayerDispatch(record, E, "layer")
        if clones is not None:
            flow.decisions.clear()
            sending.enable_clones(clones, ep.size)
        sent = sending.send(RoutedTokens(mine.x_TD, mine.weights_TK, mine.experts_TK), flow)
        given = Given(world)
        y_RD, handle = sending.run(sent, given, flow)  # type: ignore[arg-type]
        out_TD = sending.fetch(y_RD, handle, False, flow)
        assert isinstance(record, FixedShape)
        found[routing] = Came(
            float((out_TD - whole.out_TD.split(ROWS)[place]).abs().max()),
            *given.rows,
            record.buffer_rows(world.folding.sizes),
            record.max_rows_received(world.folding.sizes),
            int(flow.overflow[len(found)]),
        )
    return found


def check(sizes: str, ranks: int, way: str, slots: int) -> None:
    """Hold every rank to the rows that are stated, and to results."""
    for rank, found in enumerate(run_ranks(came, ranks, sizes, ranks, way, slots, time_out_s=60)):
        assert len(found) == len(ROUTINGS)
        for routing, one in found.items():
            assert not one.excess and one.error <= 1e-12, (rank, routing, one)
            assert one.rows == one.stated and one.filled <= one.bound, (rank, routing, one)


@pytest.mark.parametrize(("sizes", "ranks", "way", "slots"), FEW)
def test_rooms_that_are_stated_are_enough(sizes: str, ranks: int, way: str, slots: int) -> None:
    """All to one expert, to one rank, each source its own, even, and by Zipf's law."""
    check(sizes, ranks, way, slots)


@pytest.mark.matrix
@pytest.mark.parametrize(("sizes", "ranks", "way", "slots"), MORE)
def test_rooms_that_are_stated_are_enough_in_more_layouts(
    sizes: str, ranks: int, way: str, slots: int
) -> None:
    check(sizes, ranks, way, slots)
