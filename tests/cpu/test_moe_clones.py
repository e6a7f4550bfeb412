"""Plans of clones: rows are kept, slots are enough, no rank is fuller than before, load is even,
and two hops have room.

P ranks, S slices, X = P * S senders, E experts, e at home on each rank, s slots, T rows, K experts
per token.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.moe.clones import ClonePlan, place_clones, plan_clones, quotas, send_counts
from moefold.moe.dispatch.config import Clones, Spread
from moefold.planner.case import MAX_LOAD_WITH_CLONES
from tests.pure.test_moe_dispatch_config import dealt

RECORDED = json.loads(Path(__file__).parents[1].joinpath("data/recorded_counts.json").read_text())
"""Copies for each of 64 experts of layers of two small models (top 8, with and without a balancing
loss) in nine steps of training each, by model."""
KINDS = ("zipf", "one", "spiky", "one_rank", "idle", "even", "own")


def drawn(kind: str, ranks: int, slices: int, each: int, chance: torch.Generator) -> Tensor:
    """Return counts [X, E] of a routing."""
    senders, experts = ranks * slices, ranks * each
    uniform_XE = torch.rand(senders, experts, generator=chance)
    if kind == "zipf":
        power = int(torch.randint(1, 20, (), generator=chance))
        return (uniform_XE**power * 1000).long()
    counts_XE = torch.zeros(senders, experts, dtype=torch.int64)
    if kind == "one":
        counts_XE[:, int(uniform_XE[0, 0] * experts)] = 321
    elif kind == "spiky":
        counts_XE[uniform_XE < 0.1] = 777
    elif kind == "one_rank":
        counts_XE[:, :each] = (uniform_XE[:, :each] * 300).long()
    elif kind == "own":
        counts_XE[torch.arange(senders), torch.arange(senders) * 5 % experts] = 400
    else:
        counts_XE = 90 + (uniform_XE * 20).long()
        if kind == "idle":
            counts_XE[:, -each:] = 0
    return counts_XE


def check_plan(counts_XE: Tensor, ranks: int, record: Clones) -> float:
    """Hold a plan to what it promises; returns the load that it leaves, over the mean."""
    experts = counts_XE.shape[1]
    each, counts_E = experts // ranks, counts_XE.sum(0)
    quota_EP = quotas(counts_E, ranks, record)
    assert bool((quota_EP >= 0).all()) and torch.equal(quota_EP.sum(1), counts_E)
    home_E = torch.arange(experts) // each
    clone_EP = (quota_EP > 0) & (home_E[:, None] != torch.arange(ranks))
    assert int(clone_EP.sum(0).max()) <= record.slots
    assert not clone_EP.any() or int(quota_EP[clone_EP].min()) >= record.least_rows
    before, after = int(counts_E.view(ranks, -1).sum(1).max()), int(quota_EP.sum(0).max())
    assert after <= before
    seat_EP, expert_Ps = place_clones(quota_EP, record.slots)
    per_rank = each + record.slots
    for expert, rank in quota_EP.nonzero().tolist():
        at, place = divmod(int(seat_EP[expert, rank]), per_rank)
        assert at == rank and 0 <= place < per_rank
        there = int(expert_Ps[rank, place - each]) if place >= each else rank * each + place
        assert there == expert
    assert int((expert_Ps < experts).sum()) == int(clone_EP.sum())
    sent_XEP = torch.stack([send_counts(counts_XE, quota_EP, x) for x in range(len(counts_XE))])
    assert bool((sent_XEP >= 0).all()) and torch.equal(sent_XEP.sum(2), counts_XE)
    assert torch.equal(sent_XEP.sum(0), quota_EP)
    own_PE = counts_XE.unflatten(0, (ranks, -1)).sum(1)
    stay = sent_XEP.unflatten(0, (ranks, -1)).sum(1).diagonal(0, 0, 2).t()
    assert torch.equal(stay, own_PE.minimum(quota_EP.t()))
    slices = len(counts_XE) // ranks
    for at in range(slices):  # Ranks of a slice deal among themselves.
        sent_PP = sent_XEP[at::slices].sum(1).numpy()
        rows = int(max(sent_PP.sum(0).max(), sent_PP.sum(1).max()))
        room = Spread(max_rows=max(rows, 1))
        assert room.dealt_rows(ranks) * ranks >= rows
        assert int(dealt(sent_PP[None]).max()) <= room.rows_per_pair(ranks)
    return after * ranks / max(int(counts_E.sum()), 1)


def check_plans(count: int, seed: int) -> None:
    """Hold so many drawn plans to what they promise."""
    chance = torch.Generator().manual_seed(seed)
    for number in range(count):
        sizes = torch.randint(0, 4, (4,), generator=chance).tolist()
        ranks, each, slots = (2, 3, 4, 8)[sizes[0]], (1, 2, 3, 8)[sizes[1]], (1, 2, 3, 4)[sizes[2]]
        record = Clones(slots=slots, least_rows=(1, 1, 7, 100)[sizes[3]])
        slices = 1 + number % 2
        kind = KINDS[number % len(KINDS)]
        check_plan(drawn(kind, ranks, slices, each, chance), ranks, record)


def test_plans_keep_rows_and_slots() -> None:
    """Drawn and hostile counts, with slices of experts and without."""
    check_plans(70, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_plans_keep_rows_and_slots(seed: int) -> None:
    check_plans(1000, seed)


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_routings_are_even_after(kind: str, ranks: int) -> None:
    """The planner's figures for loads after clones are the most that is left of any of these."""
    counts = torch.tensor(RECORDED[kind])
    before = (counts.view(len(counts), ranks, -1).sum(2).amax(1) * ranks / counts.sum(1)).max()
    assert float(before) > 2
    for slots, bound in (
        (1, MAX_LOAD_WITH_CLONES[1]),
        (2, MAX_LOAD_WITH_CLONES[2]),
        (4, MAX_LOAD_WITH_CLONES[4]),
    ):
        left = [
            int(quotas(one, ranks, Clones(slots=slots)).sum(0).max()) * ranks / int(one.sum())
            for one in counts
        ]
        assert max(left) <= bound, (slots, max(left))
    assert MAX_LOAD_WITH_CLONES[2] <= 1.08 and MAX_LOAD_WITH_CLONES[4] <= 1.005


def test_zipf_over_many_ranks_is_even_after() -> None:
    """64 ranks, 256 experts, top 8: 6.75 times the mean before."""
    chance, ranks, experts = torch.Generator().manual_seed(1), 64, 256
    likes_E = -torch.arange(1, experts + 1).log()[torch.randperm(experts, generator=chance)]
    gumbel_TE = -torch.rand(ranks * 128, experts, generator=chance).log().neg().log()
    counts_E = (likes_E + gumbel_TE).topk(8, 1).indices.flatten().bincount(minlength=experts)
    mean = int(counts_E.sum()) / ranks
    assert int(counts_E.view(ranks, -1).sum(1).max()) / mean > 6.5
    for slots, bound in ((2, 1.04), (4, 1.0)):
        assert int(quotas(counts_E, ranks, Clones(slots=slots)).sum(0).max()) <= bound * mean


def test_a_copy_goes_where_its_share_says() -> None:
    """Seats of one rank's copies, dropped ones among them, are as many as its shares."""
    chance, experts = torch.Generator().manual_seed(3), 8
    experts_TK = torch.randint(0, experts + 1, (40, 3), generator=chance)
    experts_TK[:20] = 5
    plan = plan_clones(experts_TK, experts, Clones(slots=2), World.single())
    assert isinstance(plan, ClonePlan)
    sent = experts_TK < experts
    assert torch.equal(plan.physical_TK[sent], experts_TK[sent])
    assert bool((plan.physical_TK[~sent] == experts + 2).all())
