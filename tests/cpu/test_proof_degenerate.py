"""A proof tells what is zero by its run's maths from what is zero by chance or by a fault.

And what a number format is too coarse for from what it shows.
"""

import ast
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm.world import World
from moefold.layers.config import Bands, Rope, Yarn
from moefold.layers.rope import Angles
from moefold.moe import balance, router
from moefold.moe.config import Aux, Bias, Capacity, ExpertChoice, Moe, Router, Z
from moefold.parallel.config import Layout
from moefold.proof import pool, rank_run
from moefold.proof.case import ProofCase, Subject
from moefold.proof.compare import Outcome, find_degenerate, zero_gradients
from moefold.proof.modes import ALLOWED, PACKAGE, QUANTISERS, NarrowWatch, ShuffledSums
from moefold.proof.pool import run_reference
from moefold.proof.rank_run import RankResult, run_rank
from moefold.proof.rounding_noise import RoundingNoise
from moefold.proof.subjects import DEEPSEEK, GQA, decoder, moe, subject

ONE_OF_EIGHT = Router(experts=8, top_k=1, renormalise=False)
ONE = Router(experts=1, top_k=1, renormalise=False)


def small(mixture: Moe, **changes: Any) -> Subject:
    """Two layers of a mixture, and few rows."""
    return subject(decoder(GQA, mixture, mixture), micro_batches=1, rows=16, **changes)


def at_first(asked: Subject) -> list[str]:
    """What is degenerate by the first seed."""
    return find_degenerate(
        asked, run_rank(ProofCase("one rank", asked, Layout(), 1), World.single())
    )


def test_an_expert_left_out_by_chance_is_drawn_anew() -> None:
    asked = small(moe(router=ONE_OF_EIGHT))
    assert any("load_E: expert" in words for words in at_first(asked))
    drawn, found = run_reference(replace(asked, micro_batches=4))
    assert not find_degenerate(drawn, found)


def test_a_draw_that_shows_everything_is_kept() -> None:
    asked = small(moe(router=Router(experts=4, top_k=2)))
    assert not at_first(asked) and run_reference(asked)[0] == asked


def test_an_expert_that_no_seed_reaches_is_vacuous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bias keeps it out, and the case does not say so."""
    monkeypatch.setattr(rank_run, "BIAS", 1e3)
    monkeypatch.setattr(pool, "MAX_SEEDS", 3)
    drawn, found = run_reference(small(moe(router=replaced(DEEPSEEK, groups=None), balance=())))
    assert "layers.0.load_E: expert 0 has 0" in find_degenerate(drawn, found)


@pytest.mark.parametrize(
    "mixture",
    [
        moe(router=ExpertChoice(experts=8, top_k=2), balance=()),
        moe(capacity=Capacity(factor=0.75)),
    ],
)
def test_experts_do_not_choose_among_equal_rows(mixture: Moe) -> None:
    """First rows of documents that start alike are equal: a rounding would say which is taken."""

    def ties(one: Subject) -> list[str]:
        return find_degenerate(one, RankResult())

    fine = small(mixture)
    asked = next(one for seed in count(1) if ties(one := replace(fine, seed=seed)))
    drawn, found = run_reference(asked)
    assert drawn.seed > asked.seed and not find_degenerate(drawn, found)
    assert not ties(replace(asked, decoder=small(moe()).decoder))


def replaced(record: Any, **changes: Any) -> Any:
    """A record with other fields."""
    return record.model_copy(update=changes)


@pytest.mark.parametrize("terms", [(), (Aux(),), (Aux(over="sequence"),)])
def test_the_router_of_one_expert_has_no_gradient_and_is_excused(terms: tuple[Any, ...]) -> None:
    asked = small(moe(router=ONE, balance=terms))
    found = run_rank(ProofCase("one rank", asked, Layout(), 1), World.single())
    routers = {p.name: p.tensor for p in found.pieces["gradients"] if "router" in p.name}
    assert not any(values.any() for values in routers.values())
    assert zero_gradients(asked.decoder).keys() == routers.keys()
    assert not find_degenerate(asked, found)


@pytest.mark.parametrize(
    "mixture",
    [
        moe(router=ONE, balance=(Aux(), Z())),
        moe(router=replaced(ONE, score="sigmoid"), balance=()),
        moe(router=replaced(ONE_OF_EIGHT, selection_bias=True), balance=(Bias(),)),
        moe(router=Router(experts=2, top_k=2)),
    ],
)
def test_nothing_else_is_excused(mixture: Moe) -> None:
    """A term of which the maths are not known here reaches the router, or so it is held."""
    assert not zero_gradients(small(mixture).decoder)


def test_gradients_that_get_lost_are_vacuous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weights of chosen experts, and of a term that one expert's router has."""
    whole, z = router.weights, balance.ZLoss.__call__
    monkeypatch.setattr(pool, "MAX_SEEDS", 3)
    monkeypatch.setattr(router, "weights", lambda *given: whole(*given).detach())
    monkeypatch.setattr(balance.ZLoss, "__call__", lambda *given: z(*given).detach())
    lost = "gradients of layers.0.moe.router.weight: 0"
    for mixture in (moe(balance=()), moe(router=ONE, balance=(Z(),))):
        drawn, found = run_reference(small(mixture))
        assert lost in find_degenerate(drawn, found)


def test_what_a_format_is_too_coarse_for_is_said_and_decides_nothing() -> None:
    """An update magnifies what it pleases; a gradient of the first step is to be told."""
    shuffled = {
        ("gradients", "fine"): 0.01,
        ("gradients", "coarse"): 0.3,
        ("weights", "coarse"): 0.3,
        ("grad_norm", "step 2"): 0.3,
        ("replicas", ""): 0.0,
    }
    noise = RoundingNoise.of(
        small(moe(), precision="bf16"), [Outcome(item_errors=shuffled), Outcome()]
    )
    (problem,) = noise.problems
    assert problem.startswith("gradients of coarse: ") and "30%" in problem
    each = {("gradients", "fine"): 0.05, ("gradients", "coarse"): 2.0, ("replicas", "fine"): 1.0}
    held, bounds = noise.apply_bounds(
        Outcome(item_errors=each | {("lm_loss", "rank 1 has none"): math.inf})
    )
    assert held.errors == {"gradients": 0.05, "replicas": 1.0, "lm_loss": math.inf}
    assert all(held.errors[quantity] > bounds[quantity] for quantity in bounds)
    assert bounds["gradients"] == pytest.approx(0.04) and held.where["gradients"] == "fine"


def test_an_error_that_is_no_number_is_the_worst_of_its_quantity() -> None:
    noise = RoundingNoise.of(
        small(moe(), precision="bf16"), [Outcome(item_errors={("gradients", "a"): 0.01})]
    )
    for order in (1, -1):
        each = [(("gradients", "a"), math.nan), (("gradients", "b"), 0.1)][::order]
        held, _ = noise.apply_bounds(Outcome(item_errors=dict(each)))
        assert math.isnan(held.errors["gradients"])


def test_a_run_with_shuffled_sums_that_failed_is_told_of() -> None:
    """Else its subject had the narrowest bounds of all, and its layouts failed by them."""
    failed = Outcome(problems=("MemoryError: no room",))
    noise = RoundingNoise.of(small(moe(), precision="bf16"), [Outcome(item_errors={}), failed])
    assert noise.problems == ("one rank with reordered sums: MemoryError: no room",)


def test_every_product_of_rows_is_summed_in_another_order() -> None:
    """One into memory that is there, as experts' are, too."""
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    plain, into = a @ b, torch.empty(8, 8)
    with ShuffledSums(1, torch.float32):
        returned, into_there = a @ b, torch.mm(a, b, out=into)
    assert into_there is into
    for shuffled in (returned, into):
        assert not torch.equal(shuffled, plain)
        torch.testing.assert_close(shuffled, plain)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(),
        Rope(yarn=Yarn(factor=4.0, original_length=64)),
        Rope(bands=Bands(factor=8.0, original_length=64)),
    ],
    ids=["plain", "yarn", "bands"],
)
def test_fp32_angles_are_no_narrow_tensors_of_a_proof(rope: Rope) -> None:
    """Of any scaling: they are fp32 by definition. Plant: blend bands in a separate function."""
    with NarrowWatch() as watch:
        Angles.of(torch.arange(8), rope, 16, torch.float64)
    assert not watch.operations


def test_what_may_be_narrow_exists() -> None:
    """A function that is renamed or moved would leave its permission to whatever comes there."""
    for place in ALLOWED:
        path, function = place.split(":")
        syntax = ast.parse(Path(PACKAGE, path).read_text("utf-8"))
        for name in function.split("."):
            (syntax,) = (node for node in ast.walk(syntax) if getattr(node, "name", None) == name)
    assert all(Path(PACKAGE, path).exists() for path in QUANTISERS)
