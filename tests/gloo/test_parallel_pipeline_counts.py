"""Weight gradients put off are real: each product runs once, and W does nothing but products."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from moefold.comm.world import World
from moefold.kernels import gradients
from moefold.kernels.function import EagerMode
from moefold.kernels.swiglu.ffn import Products, grouped_products
from moefold.mesh.folding import Folding
from moefold.moe import experts, router
from moefold.parallel.pipeline.executor import Executor
from moefold.parallel.pipeline.lanes import Lanes
from moefold.schedule.table import Action, Step
from moefold.training import step
from tests.gloo.harness import run_ranks
from tests.gloo.pipelines import Case, batches, recording

GROUPED = ("product", "input_gradient", "weight_gradient")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "addmv_")
NOT_OF_WEIGHTS = ("silu", "sigmoid", "softmax", "_scaled_dot_product", "topk", "sort", "rsqrt")
"""What only a forward or its repetition computes."""
MICRO_BATCHES = 4


class Counting(Executor):
    """Counts products, experts' and others, operations of a forward, choices of experts and
    exchanges by kind of action.
    """

    seen: Counter[tuple[str, str]]
    kind = ""

    def _step(self, step: Step, lanes: Lanes) -> None:
        assert isinstance(step, Action)
        Counting.kind = step.kind
        recorder = self._parts.world.recorder
        before = sum(recorder.begun_counts().values())
        with _Products() as products:
            super()._step(step, lanes)
        self.seen[step.kind, "product"] += products.count
        self.seen[step.kind, "forward"] += products.forward
        self.seen[step.kind, "exchange"] += sum(recorder.begun_counts().values()) - before


class _Products(EagerMode):
    count = forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.count += name in PRODUCTS
        self.forward += name.startswith(NOT_OF_WEIGHTS)
        return func(*args, **(kwargs or {}))


def counting(what: str, call: Any) -> Any:
    """Return a function that is counted under the kind of the action that calls it."""

    def counted(*given: Any, **named: Any) -> Any:
        Counting.seen[Counting.kind, what] += 1
        return call(*given, **named)

    return counted


def counted_products(*given: Any) -> Products:
    """Return the experts' products, counted."""
    whole = grouped_products(*given)
    return Products(*(counting(f"grouped {name}", getattr(whole, name)) for name in GROUPED))


def count(rank: int, cases: Sequence[Case], ranks: int) -> list[tuple[Counter[Any], Counter[str]]]:
    """Run cases; returns what each kind of action did, and how often each weight got a product."""
    world = World.open(Folding(cases[0].where.split, ranks), "cpu", 30)
    return [count_one(case, world) for case in cases]


def count_one(case: Case, world: World) -> tuple[Counter[Any], Counter[str]]:
    """Run a case on this rank."""
    data = case.data(world)
    names = {id(p): name for name, p in data.parts.model.named_parameters()}
    added: Counter[str] = Counter()
    sound = gradients.accumulate

    def accumulated(weight: torch.Tensor, product: Any) -> None:
        added[names[id(weight)]] += 1
        sound(weight, product)

    Counting.seen = Counter()
    with (
        mock.patch.object(gradients, "accumulate", accumulated),
        mock.patch.object(experts, "grouped_products", counted_products),
        mock.patch.object(router, "select", counting("choice", router.select)),
        recording(Counting),
    ):
        step.gradients(data, batches(case.micro_batches), 16)
    return Counting.seen, added


def all_seen(
    cases: Sequence[Case], ranks: int = 2
) -> list[list[tuple[Counter[Any], Counter[str]]]]:
    """Return the counts of every rank, case by case."""
    return run_ranks(count, ranks, cases, ranks)


FULL = {"recompute": {"kind": "full"}}


APART = {
    "tp2 ep2": (("zb_h1", {}), ("1f1b", {}), ("zb_h1", FULL)),
    "pp2 vpp2": (("zb_v", {}), ("interleaved", {})),
}
"""Schedules whose weight gradients are put off, and others."""


@cache
def put_off(sizes: str) -> list[list[tuple[Counter[Any], Counter[str]]]]:
    """Return the counts of every rank for each of the layout's schedules."""
    cases = [Case(sizes, kind, "deep", MICRO_BATCHES, more) for kind, more in APART[sizes]]
    return [list(ranks) for ranks in zip(*all_seen(cases), strict=True)]


@pytest.mark.parametrize("sizes", APART)
def test_products_run_once_whether_put_off_or_not(sizes: str) -> None:
    apart, whole, *_ = put_off(sizes)
    for name in {*apart[0][1], *apart[1][1]}:
        assert sum(added[name] for _, added in apart) == sum(added[name] for _, added in whole)
    products = [
        {kind: sum(counts[kind, "product"] for counts, _ in ranks) for kind in "FBIW"}
        for ranks in (apart, whole)
    ]
    assert products[0]["F"] == products[1]["F"] > 0
    assert products[0]["I"] + products[0]["W"] == products[1]["B"]
    assert products[0]["W"] > 0


def test_w_exchanges_nothing_and_computes_nothing_again() -> None:
    # No weight has copies here, so that no data ranks sum a gradient once it is complete.
    plain, _, again = put_off("tp2 ep2")
    for (counts, added), (repeated, added_again) in zip(plain, again, strict=True):
        assert counts["I", "exchange"] > 0, "the tensor ranks exchange in backward"
        assert counts["W", "exchange"] == repeated["W", "exchange"] == 0
        assert repeated["I", "forward"] > counts["I", "forward"], "the forward runs again in I"
        assert counts["W", "forward"] == repeated["W", "forward"] == 0
        assert counts["W", "product"] == repeated["W", "product"]
        assert added == added_again
        every = {n: added[n] for n in added if n.endswith(("q.weight", "w_in", "w_out"))}
        assert set(every.values()) == {MICRO_BATCHES}, every


def again(*kinds: str) -> Case:
    """Return a case of three layers, two of them mixtures, that makes kinds of module again."""
    modules = {"recompute": {"kind": "selective", "modules": list(kinds)}}
    layout = FULL if kinds == ("block",) else modules if kinds else {}
    return Case("tp2", "zb_h1", "mla", MICRO_BATCHES, layout)


def test_what_is_made_again_is_made_once_and_nothing_else() -> None:
    """Norms, copies of rows and padding take no product, the experts' pre-activation one."""
    layers, repeats = 2 * MICRO_BATCHES, {"experts": 1, "block": 2}
    kinds = ("norms", "permute", "mla_up", "attention", "experts", "gather", "block")
    for plain, *found in all_seen([again(), *map(again, kinds)]):
        usual, added = plain
        assert set(added.values()) == {MICRO_BATCHES}, "every weight has one gradient a pass"
        for kind, (counts, added_again) in zip(kinds, found, strict=True):
            assert added_again == added
            grouped = {name: counts["I", f"grouped {name}"] for name in GROUPED}
            wanted = {"product": repeats.get(kind, 0), "input_gradient": 2, "weight_gradient": 0}
            assert grouped == {name: times * layers for name, times in wanted.items()}, kind
            assert counts["W", "grouped weight_gradient"] == 2 * layers
            choices = {action: counts[action, "choice"] for action in "FIW"}
            assert choices == {"F": layers, "I": 0, "W": 0}, kind
            more = {
                action: counts[action, "exchange"] - usual[action, "exchange"] for action in "FIW"
            }
            assert (more.pop("I") > 0) == (kind in ("gather", "block")), kind
            assert more == {"F": 0, "W": 0}, "experts' copies are summed there, and no more"
            products = counts["I", "product"] - usual["I", "product"]
            assert (products > 0) == (kind in ("mla_up", "experts", "block")), kind
            for what in ("product", "forward"):
                assert counts["W", what] == usual["W", what], "only weights' products wait for W"
