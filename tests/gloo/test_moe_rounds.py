"""A mixture in rounds: what one rank gives, and never more rows on any rank than are stated.

T rows of a rank, D hidden, K experts per token, E experts, R rows after dispatch.
"""

from dataclasses import dataclass, field
from itertools import product
from weakref import ref

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.gradients import DeferredSink, EagerSink
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.mesh.config import Sizes
from moefold.moe.dispatch.config import LocalExperts, Padded, Spread
from moefold.moe.dispatch.routing_plan import RoutedTokens
from moefold.moe.layer_dispatch import LayerDispatch
from tests.cpu.small import padded_rows
from tests.gloo.dispatching import (
    D,
    E,
    Results,
    Routed,
    expert_weights,
    gap,
    here,
    joined,
    open_world,
    run_experts,
    sources,
    there_and_back,
)
from tests.gloo.harness import run_ranks

ROWS = 24
ROUTINGS = ("one_expert", "one_rank", "own_expert", "uniform", "zipf")
LAYOUTS = ("ep4", "ep2 etp2")


def uneven(routing: str, rank: int) -> Routed:
    """Return rows of a rank, of which some copies are dropped."""
    chance = torch.Generator().manual_seed(10 * ROUTINGS.index(routing) + rank)
    likes_E = torch.zeros(E)
    if routing == "zipf":
        likes_E = -torch.arange(1, E + 1).log()
    elif routing == "one_rank":
        likes_E[: E // 4] = 9
    elif routing != "uniform":
        likes_E[5 if routing == "one_expert" else 3 * rank % E] = 99
    gumbel_TE = -torch.rand(ROWS, E, generator=chance).log().neg().log()
    experts_TK = (likes_E + gumbel_TE).topk(1 if routing == "one_expert" else 2, 1).indices
    experts_TK = torch.where(torch.rand(experts_TK.shape, generator=chance) < 0.1, E, experts_TK)
    top_k = experts_TK.shape[1]
    x_TD, weights_TK, cotangent_TD = (
        torch.randn(ROWS, n, generator=chance, dtype=torch.float64) for n in (D, top_k, D)
    )
    return Routed(x_TD, torch.where(experts_TK < E, weights_TK, 0), experts_TK, cotangent_TD)


@dataclass
class Watched:
    """Experts that note the rows they are given, and how many of earlier calls are alive."""

    weights: tuple[Tensor, Tensor]
    rows: list[int] = field(default_factory=list)
    alive: int = 0
    given: list[ref[Tensor]] = field(default_factory=list)

    def __call__(self, x_RD: Tensor, offs_E: Tensor, probs_R: Tensor, *_: Flow | None) -> Tensor:
        """Run the experts that are here."""
        self.alive = max(self.alive, sum(one() is not None for one in self.given))
        self.rows.append(x_RD.shape[0])
        self.given.append(ref(x_RD))
        return run_experts(x_RD, offs_E, probs_R, *self.weights)


def in_rounds(rows: Routed, room: int, world: World) -> tuple[Results, Watched]:
    """Send rows by the second try of a dispatcher with so much room on each rank."""
    w_in, w_out = (w.clone().requires_grad_() for w in here(world, *expert_weights()))
    x_TD, weights_TK = (t.clone().requires_grad_() for t in (rows.x_TD, rows.weights_TK))
    sending, watched = LayerDispatch(Spread(max_rows=room), E, "layer"), Watched((w_in, w_out))
    flow = Flow(padded_rows((ROWS,), 0), PrecisionPolicy("fp64"), world=world, exact=True)
    sent = sending.send(RoutedTokens(x_TD, weights_TK, rows.experts_TK), flow)
    out_TD = sending.fetch(*sending.run(sent, watched, flow), False, flow)  # type: ignore[arg-type]
    (out_TD * rows.cotangent_TD).sum().backward()
    leaves = (x_TD, weights_TK, w_in, w_out)
    found = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return Results(out_TD.detach(), *found), watched


def bounded(rank: int, sizes: str) -> dict[tuple[str, int], tuple[float, int, int, Watched]]:
    """Return by routing and room the error, the rows needed, and what experts were given."""
    world, found = open_world(sizes, 4), {}
    slices, ranks = world.group("etp").size, sources(world)
    for routing, times in product(ROUTINGS, (1, 2, 99)):
        parts = [uneven(routing, one) for one in ranks]
        whole = there_and_back(LocalExperts(), joined(parts), *expert_weights())
        place = ranks.index(world.rank)
        mine = (t.split(ROWS)[place] for t in (whole.out_TD, whole.dx_TD, whole.dweights_TK))
        want = Results(*mine, *here(world, whole.dw_in, whole.dw_out))  # type: ignore[call-arg]
        sent = joined(parts).experts_TK
        per_rank = E // world.group("ep").size
        most = int(torch.bincount(sent[sent < E] // per_rank).max())
        mean = -(-int((sent < E).sum()) // world.group("ep").size)
        room = -(-times * mean // slices)
        ours, watched = in_rounds(parts[place], room, world)
        found[routing, times] = gap(ours, want), most, room * slices, watched.rows, watched.alive
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_no_rank_has_more_rows_than_its_room_whatever_is_routed(sizes: str) -> None:
    """Rounds are as many as the fullest rank needs, on all ranks; each runs again in backward."""
    counts = set()
    for rank, found in enumerate(run_ranks(bounded, 4, sizes, time_out_s=60)):
        assert len(found) == 3 * len(ROUTINGS)
        for key, (error, most, room, rows, alive) in found.items():
            rounds = -(-most // room)
            assert error <= 1e-12, (rank, key, error)
            assert max(rows) <= room, (rank, key, rows)
            assert len(rows) == (rounds if rounds == 1 else 2 * rounds), (rank, key, rows)
            assert not alive, (rank, key)
            counts.add(rounds)
    assert {1, 2} <= counts


def test_products_of_rounds_leave_no_rows_waiting() -> None:
    """Where weights' products wait, one sum of each waits instead, whatever the rounds."""
    queue, weight = DeferredSink(), torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    sink, kept = EagerSink(queue), []
    for value in (1.0, 2.0, 4.0):
        rows_RD = torch.full((5, 2), value, dtype=torch.float64)
        kept.append(ref(rows_RD))

        def product(into: Tensor | None, rows_RD: Tensor = rows_RD) -> Tensor:
            made = rows_RD.sum(0).expand(3, -1)
            return made.clone() if into is None else into.add_(made)

        sink.deliver(weight, product)
        del rows_RD, product
    assert len(queue.pending) == 1 and weight.grad is None
    assert not any(one() is not None for one in kept)
    assert queue.drain() == 1 and weight.grad is not None
    assert weight.grad.unique().tolist() == [35.0]


def test_room_that_a_rank_is_sent_is_what_is_stated() -> None:
    """Of `padded` all pairs' rooms; of `spread` that of a rank, without what dealing rounds up."""
    sizes = Sizes(ep=4, etp=2)
    assert (
        Padded(max_rows=3).max_rows_received(sizes) == 24 == Padded(max_rows=3).buffer_rows(sizes)
    )
    assert (
        Spread(max_rows=10).max_rows_received(sizes) == 20 < Spread(max_rows=10).buffer_rows(sizes)
    )
