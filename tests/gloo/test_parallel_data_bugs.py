"""Bugs that data parallelism is known for, each on ranks that share in every way."""

import math
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.layers.config import Full, RecomputeKind, Selective
from moefold.layers.placement import Box
from moefold.mesh.folding import Folding
from moefold.optim.norm import clip_scale
from moefold.parallel import apply
from moefold.parallel.data.sharding import ShardedState
from moefold.training.step import gradients
from tests.cpu import small
from tests.gloo.harness import Reference, run_ranks
from tests.gloo.shares import CHUNK, CLIP, OPTIMIZERS, Case, batches, opened, own, update

SHARED = (
    *(Case(zero=zero) for zero in (0, 3)),
    Case(zero=2, more=(("zero_ranks", 2),)),
    Case("tp2", 1, model="tied"),
    Case("ep2", 2),
    Case("ep4", 1),
    Case("pp2", 3, model="tied", micro_batches=8),
)
AGAIN = (
    Case(zero=3, model="latent", more=(("recompute", Selective(modules=get_args(RecomputeKind))),)),
    Case("pp2", 3, micro_batches=8, more=(("schedule", "merged"), ("recompute", Full()))),
)
"""Weights that are there for a unit's pass alone, and units that run again."""
RANKS = 4
FROZEN = ("embed", "layers.0")


@Reference
def one_rank(alone: Case, count: int) -> tuple[dict[str, Tensor], float]:
    """Return whole gradients of so many micro-batches and their norm."""
    data = opened(alone, 1)
    figures = gradients(data, batches(count), CHUNK)
    return {held.name: held.tensor for held in data.gradients()}, figures.grad_norm


def error(data: ShardedState, whole: dict[str, Tensor], times: float = 1.0) -> float:
    """Return the largest relative error of a gradient here."""
    found = [0.0]
    for held in data.gradients():
        want = whole[held.name]
        there = want[tuple(slice(*ends) for ends in held.box)] * times
        found.append(float((held.tensor - there).norm() / want.norm().clamp(min=1e-300)))
    return max(found)


def counted(case: Case) -> dict[str, Any]:
    """Return the norm said, and the parts that it is made of."""
    data = opened(case, RANKS)
    figures = gradients(data, own(case, data), CHUNK)
    stated = {
        (held.name, held.box): float(held.tensor.square().sum())
        for held in data.gradients()
        if held.is_first
    }
    _, norm = one_rank(case.alone, case.micro_batches)
    clip = clip_scale(figures.grad_norm, CLIP)
    return {"said": figures.grad_norm, "clip": clip, "stated": stated, "alone": norm}


def experts_alone(case: Case) -> float:
    """Return the largest error of an expert's gradient."""
    data = opened(case, RANKS)
    gradients(data, own(case, data), CHUNK)
    whole, _ = one_rank(case.alone, case.micro_batches)
    experts = {name: grad for name, grad in whole.items() if ".experts." in name}
    assert len(experts) == 2
    others = {name: torch.zeros_like(grad) for name, grad in whole.items()}
    for held in list(data.gradients()):
        if held.name not in experts:
            held.tensor.zero_()
    return error(data, others | experts)


def repeated(case: Case) -> float:
    """Return gradients of one micro-batch on every rank, again and again."""
    data = opened(case, RANKS)
    some = batches(1)
    times = case.micro_batches // data.parts.world.folding.dp
    gradients(data, some * times, CHUNK)
    for bucket in data.buckets:  # a step that is given up with sums under way
        bucket.begin_step()
        bucket.open_gradients()
        if bucket.gradients is not None:
            bucket.gradients.fill_(1)
        bucket.reduce()
    gradients(data, some * times, CHUNK)  # starts from nothing
    whole, _ = one_rank(case.alone, 1)
    return error(data, whole)


def without_rows(case: Case) -> dict[str, Any]:
    """Return the losses and gradients where data rank 1 has no valid row and an expert no token."""
    data = opened(case, RANKS)
    empty = small.padded_rows((), 24)
    rows = [empty if number % 2 else batch for number, batch in enumerate(batches(4))]
    world = data.parts.world
    mine = rows[world.attention.dp :: world.folding.dp] * (case.micro_batches // 4)
    optimizer = data.optimizer(OPTIMIZERS[case.optim])
    for mixture in (mixture for _, mixture in data.parts.model.moe_layers()):
        mixture.router.selection_bias = torch.zeros(8, dtype=torch.float64)
        mixture.router.selection_bias[3] = -1e6
    figures = gradients(data, mine, CHUNK)
    missing = [n for n, p in data.params.items() if p.grad is None]
    idle = [
        float(held.tensor[3 - held.box[0][0]].abs().max())
        for held in data.gradients()
        if ".experts." in held.name and held.box[0][0] <= 3 < held.box[0][1]
    ]
    update(data, optimizer, figures.grad_norm)
    steps = {int(t) for key, t in optimizer.state().items() if key.endswith(".step")}
    return {"missing": missing, "steps": steps, "idle": idle, "norm": figures.grad_norm}


def frozen(case: Case) -> dict[str, Any]:
    """Return what frozen units look like after three steps."""
    data = opened(case, RANKS, frozen=FROZEN)
    before = {(h.name, h.box): h.tensor.clone() for h in data.weights()}
    optimizer = data.optimizer(OPTIMIZERS[case.optim])
    for _ in range(3):
        figures = gradients(data, own(case, data), CHUNK)
        update(data, optimizer, figures.grad_norm)
    changed = {h.name for h in data.weights() if not torch.equal(before[h.name, h.box], h.tensor)}
    return {
        "changed": changed,
        "state": {key.removeprefix("optim.").rpartition(".")[0] for key in optimizer.state()},
        "error": error(data, one_rank_frozen(case.alone)),
    }


@Reference
def one_rank_frozen(alone: Case) -> dict[str, Tensor]:
    """Return whole gradients of the third step with frozen units."""
    data = opened(alone, 1, frozen=FROZEN)
    state = data.optimizer(OPTIMIZERS[alone.optim])
    for _ in range(3):
        figures = gradients(data, batches(alone.micro_batches), CHUNK)
        update(data, state, figures.grad_norm)
    return {held.name: held.tensor for held in data.gradients()}


def next_step(case: Case) -> float:
    """Return the largest error of a gradient after an update."""
    data = opened(case, RANKS)
    optimizer = data.optimizer(OPTIMIZERS[case.optim])
    for _ in range(2):
        norm = gradients(data, own(case, data), CHUNK).grad_norm
        found = error(data, one_rank_next(case.alone))
        update(data, optimizer, norm)
    return found


@Reference
def one_rank_next(alone: Case) -> dict[str, Tensor]:
    """Return whole gradients of the second step."""
    data = opened(alone, 1)
    state = data.optimizer(OPTIMIZERS[alone.optim])
    update(data, state, gradients(data, batches(alone.micro_batches), CHUNK).grad_norm)
    gradients(data, batches(alone.micro_batches), CHUNK)
    return {held.name: held.tensor for held in data.gradients()}


QUESTIONS = {
    "again": next_step,
    "counted": counted,
    "experts": experts_alone,
    "repeated": repeated,
    "empty": without_rows,
    "frozen": frozen,
}
EMPTY = tuple(case for case in SHARED if case.model == "small" and case.sizes != "ep4")
ASKED = {
    "again": AGAIN,
    "empty": EMPTY,
    "experts": tuple(case for case in SHARED if case.model == "small"),
    "frozen": tuple(case for case in SHARED if case.zero and not case.more),
}


def answered(rank: int) -> dict[tuple[str, Case], Any]:
    """Answer each question of its cases on this rank."""
    return {
        (what, case): question(case)
        for what, question in QUESTIONS.items()
        for case in ASKED.get(what, SHARED)
    }


@cache
def answers() -> list[dict[tuple[str, Case], Any]]:
    """Return what each rank answered."""
    for case in SHARED:
        one_rank(case.alone, case.micro_batches)
        one_rank(case.alone, 1)
        one_rank_frozen(case.alone)
    for case in AGAIN:
        one_rank_next(case.alone)
    references = [one_rank, one_rank_frozen, one_rank_next]
    return run_ranks(answered, RANKS, time_out_s=120, references=references)


def of(what: str, case: Case) -> list[Any]:
    """Return the ranks' answers to one question."""
    return [rank[what, case] for rank in answers()]


@pytest.mark.parametrize("case", ASKED["experts"], ids=str)
def test_experts_gradients_are_sums_whatever_their_copies(case: Case) -> None:
    assert max(of("experts", case)) <= 1e-12


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_each_element_counts_once_in_the_norm(case: Case) -> None:
    told = of("counted", case)
    assert len({(rank["said"], rank["clip"]) for rank in told}) == 1
    stated: dict[tuple[str, Box], float] = {}
    for rank in told:
        assert not stated.keys() & rank["stated"].keys()
        stated |= rank["stated"]
    assert told[0]["said"] == pytest.approx(math.sqrt(sum(stated.values())), rel=1e-12)
    assert told[0]["said"] == pytest.approx(told[0]["alone"], rel=1e-12)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_ranks_without_rows_and_experts_without_tokens_have_zeros(case: Case) -> None:
    told = of("empty", case)
    assert len({rank["norm"] for rank in told}) == 1 and math.isfinite(told[0]["norm"])
    assert all(not rank["missing"] and rank["steps"] == {1} for rank in told)
    idle = [value for rank in told for value in rank["idle"]]
    assert idle and not any(idle)


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_no_micro_batch_and_no_rank_is_added_twice(case: Case) -> None:
    assert max(of("repeated", case)) <= 1e-12


@pytest.mark.parametrize("case", AGAIN, ids=str)
def test_units_whose_weights_are_gathered_run_again_with_them(case: Case) -> None:
    assert max(of("again", case)) <= 1e-10


@pytest.mark.parametrize("case", ASKED["frozen"], ids=str)
def test_frozen_units_stay_bit_for_bit_and_have_no_state(case: Case) -> None:
    told = of("frozen", case)
    assert any(rank["changed"] for rank in told)
    for rank in told:
        assert not [name for name in rank["changed"] if name.startswith(FROZEN)]
        assert not [name for name in rank["state"] if name.startswith(FROZEN)]
        assert rank["error"] <= 1e-10


def test_neighbours_that_do_not_divide_the_copies_are_refused() -> None:
    for said in run_ranks(refused, RANKS):
        assert "must divide the 4 ranks that hold copies of dense weights" in said


def refused(rank: int) -> str:
    """Return what is said of runs over three of four ranks."""
    case = Case(more=(("zero_ranks", 3),))
    world = World.open(Folding(case.layout.split, RANKS), "cpu", 30)
    parts = apply.build_parts(small.decoder(), "fp64", case.layout, world)
    with pytest.raises(ValueError, match="zero_ranks") as error:
        ShardedState(parts)
    return str(error.value)
