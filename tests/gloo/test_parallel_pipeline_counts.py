"""Weight gradients put off are real: each product runs once, and W does nothing but products."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.comm.world import World
from moefold.kernels import gradients
from moefold.mesh.folding import Folding
from moefold.parallel.pipeline.executor import Executor
from moefold.parallel.pipeline.lanes import Lanes
from moefold.schedule.table import Action, Step
from moefold.training import step
from tests.gloo.harness import run_ranks
from tests.gloo.pipelines import Case, batches, recording

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "addmv_")
NOT_OF_WEIGHTS = ("silu", "sigmoid", "softmax", "_scaled_dot_product", "topk", "sort", "rsqrt")
"""What only a forward or its repetition computes."""
MICRO_BATCHES = 4


class Counting(Executor):
    """Counts products, operations of a forward and exchanges by kind of action."""

    seen: Counter[tuple[str, str]]

    def _step(self, step: Step, lanes: Lanes) -> None:
        assert isinstance(step, Action)
        recorder = self._placed.world.recorder
        before = sum(recorder.begun().values())
        with _Products() as products:
            super()._step(step, lanes)
        self.seen[step.kind, "product"] += products.count
        self.seen[step.kind, "forward"] += products.forward
        self.seen[step.kind, "exchange"] += sum(recorder.begun().values()) - before


class _Products(TorchDispatchMode):
    count = forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.count += name in PRODUCTS
        self.forward += name.startswith(NOT_OF_WEIGHTS)
        return func(*args, **(kwargs or {}))


def count(rank: int, case: Case, ranks: int) -> tuple[Counter[Any], Counter[str]]:
    """Run a case; returns what each kind of action did, and how often each weight got a product."""
    world = World.open(Folding(case.where.split, ranks), "cpu", 30)
    data = case.data(world)
    names = {id(p): name for name, p in data.placed.model.named_parameters()}
    added: Counter[str] = Counter()
    sound = gradients.accumulate

    def counted(weight: torch.Tensor, product: Any) -> None:
        added[names[id(weight)]] += 1
        sound(weight, product)

    Counting.seen = Counter()
    gradients.accumulate = counted
    try:
        with recording(Counting):
            step.gradients(data, batches(case.micro_batches), 16)
    finally:
        gradients.accumulate = sound
    return Counting.seen, added


def seen(case: Case, ranks: int = 2) -> list[tuple[Counter[Any], Counter[str]]]:
    """Return the counts of every rank."""
    return run_ranks(count, ranks, case, ranks)


FULL = {"recompute": {"kind": "full"}}


@pytest.mark.parametrize(
    "sizes, schedule, other",
    [("tp2 ep2", "zb_h1", "1f1b"), ("pp2 vpp2", "zb_v", "interleaved")],
)
def test_products_run_once_whether_put_off_or_not(sizes: str, schedule: str, other: str) -> None:
    apart = seen(Case(sizes, schedule, "deep", MICRO_BATCHES))
    whole = seen(Case(sizes, other, "deep", MICRO_BATCHES))
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
    plain = seen(Case("tp2 ep2", "zb_h1", "deep", MICRO_BATCHES))
    again = seen(Case("tp2 ep2", "zb_h1", "deep", MICRO_BATCHES, FULL))
    for (counts, added), (repeated, added_again) in zip(plain, again, strict=True):
        assert counts["I", "exchange"] > 0, "the tensor ranks exchange in backward"
        assert counts["W", "exchange"] == repeated["W", "exchange"] == 0
        assert repeated["I", "forward"] > counts["I", "forward"], "the forward runs again in I"
        assert counts["W", "forward"] == repeated["W", "forward"] == 0
        assert counts["W", "product"] == repeated["W", "product"]
        assert added == added_again
        every = {n: added[n] for n in added if n.endswith(("q.weight", "w_in", "w_out"))}
        assert set(every.values()) == {MICRO_BATCHES}, every
