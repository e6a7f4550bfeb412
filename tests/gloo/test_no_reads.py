"""A step of fixed shapes reads nothing between its first forward and its last backward."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.layers.config import Full, Offload, OffloadToPages, Selective
from moefold.mesh.folding import Folding
from moefold.model.init import initial_values
from moefold.moe.dispatch.config import Clones, Padded, Spread
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Executor
from moefold.training.step import gradients
from tests.gloo.harness import run_ranks
from tests.gloo.test_moe_dispatch_layouts import batches, small
from tests.reads import watched

PADDED, SPREAD, CLONES = Padded(max_rows=64), Spread(max_rows=150), Clones(slots=2)
AGAIN = Selective(modules=("norms", "experts", "attention", "permute", "gather"))
PAGES = Offload(pages=OffloadToPages(page=8, load=4, spill=1))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"sizes": "tp2 ep4", "dispatch": PADDED, "zero": 1, "recompute": AGAIN, "offload": PAGES},
    {"sizes": "pp2 ep2", "dispatch": SPREAD, "zero": 3, "clones": CLONES, "recompute": Full()},
)
MORE: tuple[dict[str, Any], ...] = (
    {"sizes": "ep4", "dispatch": PADDED, "zero": 0},
    {"sizes": "tp2 ep4", "dispatch": SPREAD, "zero": 1, "recompute": AGAIN},
    {"sizes": "ep2 etp2", "dispatch": SPREAD, "zero": 3, "clones": CLONES},
    {"sizes": "pp2 ep2", "dispatch": PADDED, "zero": 2, "clones": CLONES, "schedule": "zb_h1"},
)
Found = tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]


def reads_of(rank: int, layouts: tuple[dict[str, Any], ...]) -> list[Found]:
    """Return what the second step of each layout reads in its passes, and in all."""
    found = []
    for given in layouts:
        layout = Layout(**given, experts="grouped")  # as on a GPU
        world = World.open(Folding(layout.split, 4), "cpu", 20)
        data = ShardedState(build_parts(small(), "bf16", layout, world))
        data.fill(initial_values(data.parts.model.record, 1))
        dp, here = world.folding.dp, world.attention.dp
        mine = [batch for j, batch in enumerate(batches(8)) if j % dp == here]
        gradients(data, mine, 16)
        inner: list[dict[tuple[str, str], int]] = []
        run = Executor.run

        def passes(executor: Executor, run: Any = run, inner: Any = inner) -> Any:
            with watched() as seen:
                ran = run(executor)
            inner.append(dict(seen))
            return ran

        with mock.patch.object(Executor, "run", passes), watched() as seen:
            gradients(data, mine, 16)
        (passing,) = inner
        found.append((passing, dict(seen)))
    return found


def check(layouts: tuple[dict[str, Any], ...]) -> None:
    """Hold steps to no read in passes, and one at the end."""
    for found in run_ranks(reads_of, 4, layouts, time_out_s=90):
        for given, (passing, whole) in zip(layouts, found, strict=True):
            assert not passing, (given, passing)
            # Micro-batches lie on the host until they are cut: reading them waits for nothing.
            whole = {key: n for key, n in whole.items() if not key[1].startswith("batch.py:")}
            assert [(name, n) for (name, _), n in whole.items()] == [("tolist", 1)], (given, whole)
            assert all(at.startswith("norm.py:") for _, at in whole)


def test_a_step_reads_once() -> None:
    """Where rows have fixed room, with clones and what is made again: loss, norm and flags."""
    check(LAYOUTS)


@pytest.mark.matrix
def test_a_step_of_more_layouts_reads_once() -> None:
    """Every axis that experts are cut by, and every stage of zero."""
    check(MORE)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved", "zb_v"])
def test_a_step_of_any_schedule_reads_once(schedule: str) -> None:
    """With each way of fixed room and each recompute policy."""
    sizes = "pp2 vpp2 ep2" if schedule in ("interleaved", "zb_v") else "pp2 ep2"
    ways: tuple[dict[str, Any], ...] = (
        {"dispatch": PADDED},
        {"dispatch": SPREAD},
        {"dispatch": SPREAD, "clones": CLONES},
        {"dispatch": PADDED, "offload": PAGES},
    )
    policies = (None, AGAIN, Full())
    check(
        tuple(
            {"sizes": sizes, "schedule": schedule, "recompute": again, **way}
            for way in ways
            for again in policies
            if "offload" not in way or not isinstance(again, Full)
        )
    )


def _item(x: Tensor) -> object:
    return x[0].item()


def _tolist(x: Tensor) -> object:
    return x.tolist()


def _nonzero(x: Tensor) -> object:
    return x.nonzero()


def _mask(x: Tensor) -> object:
    return x[x > 1]


def _repeat(x: Tensor) -> object:
    return x.repeat_interleave(x)


def _bool(x: Tensor) -> object:
    return 1 if x.sum() > 3 else 0


PLANTED = {"item": _item, "tolist": _tolist, "nonzero": _nonzero, "index": _mask}
PLANTED |= {"repeat_interleave": _repeat, "__bool__": _bool}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_read_is_noticed_with_its_line(what: str, backward: bool) -> None:
    """In a forward, and in a backward that autograd runs."""
    function = PLANTED[what]
    line = function.__code__.co_firstlineno + 1

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, read: Callable[[Tensor], object]) -> Tensor:
            ctx.read = read
            if not backward:
                read(torch.tensor([1, 2, 3]))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            if backward:
                ctx.read(torch.tensor([1, 2, 3]))
            return grad * 2, None

    with watched() as seen:
        Reading.apply(torch.ones(2, requires_grad=True), function).sum().backward()
    places = {at for _, at in seen}
    assert places == {f"test_no_reads.py:{line}"}, seen
    assert what in {name.partition(".")[0] for name, _ in seen}


def test_what_has_a_stated_size_is_no_read() -> None:
    """Indices, repeats of stated length, and choices by a mask that keep their shape."""
    x = torch.tensor([1, 2, 3])
    with watched() as seen:
        x[torch.tensor([0, 1])] = 5
        x.repeat_interleave(torch.tensor([1, 1, 2]), output_size=4)
        torch.where(x > 1, x, 0).index_select(0, torch.tensor([2])).clamp(max=1)
    assert not seen
