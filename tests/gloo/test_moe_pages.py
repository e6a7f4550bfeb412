"""Steps whose experts' rows lie in pages: the same bits, as many pages as planned, a second try."""

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, from_ids
from moefold.kernels.pages.ring import PageRing
from moefold.layers.stash import Pages
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder, Stack
from moefold.model.init import initial_values
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import executor
from moefold.parallel.pipeline.executor import pages_of
from moefold.training.step import gradients
from tests.cpu.small import relative
from tests.gloo.harness import run_ranks
from tests.gloo.test_moe_dispatch_layouts import batches, small
from tests.gloo.test_planner_schedules import evenly

PADDED, SPREAD = {"kind": "padded", "max_rows": 64}, {"kind": "spread", "max_rows": 150}
SELECTIVE = {"kind": "selective", "modules": ["norms", "experts"]}


class Asked(NamedTuple):
    """A layout of four ranks, and the format of its products."""

    layout: dict[str, Any]
    precision: Any = "fp64"
    spill: float = 0.0
    """Share of the layers whose pages go on to the host."""


FEW = (
    Asked({"sizes": "pp2 ep2", "schedule": "zb_h1", "zero": 2, "dispatch": PADDED}, spill=1),
    Asked({"sizes": "ep2 etp2", "zero": 1, "dispatch": SPREAD, "clones": {"slots": 1}}, "bf16"),
)
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "merged", "interleaved", "zb_v", "dualpipe_v")
PAIRS = ("merged", "dualpipe_v")
VIRTUAL = ("interleaved", "zb_v", "dualpipe_v")
"""Schedules of several chunks a rank."""
MORE = (
    *(
        Asked(
            {
                "sizes": "pp2 vpp2 ep2" if kind in VIRTUAL else "pp2 ep2",
                "schedule": kind,
                "zero": number % 4,
                "dispatch": (PADDED, SPREAD)[number % 2],
            },
            spill=spill,
        )
        for number, kind in enumerate(SCHEDULES)
        for spill in (0, 0.5, 1)
    ),
    *(
        Asked({"sizes": sizes, "zero": zero, "dispatch": way, "recompute": again}, precision, spill)
        for zero, sizes in enumerate(("ep4", "tp2 ep4", "cp2 ep2", "ep2 etp2"))
        for spill, way in enumerate((PADDED, SPREAD))
        for again, precision in ((None, "bf16"), (SELECTIVE, "fp64"))
    ),
)


class Step(NamedTuple):
    """What a step gave on one rank."""

    gradients: dict[str, Tensor]
    load: float
    """That pages lacked."""
    most: list[tuple[int, int]]
    """Pages that were in use at most, and all, of each form."""


def step_of(
    asked: Asked,
    world: World,
    load: float | None,
    model: Decoder,
    given: list[MicroBatch],
    cut: int = 1,
) -> Step:
    """Run forward and backward of a step, with pages for a load if any, and of these a part."""
    stated = {"page": 4, "load": load, "spill": asked.spill}
    pages = None if load is None else {"pages": stated, "in_flight": 1}
    layout = Layout.model_validate({**asked.layout, "offload": pages})
    parts = build_parts(model, asked.precision, layout, world)
    data = ShardedState(parts)
    data.fill(initial_values(parts.model.record, 1))
    dp, here = world.folding.dp, world.attention.dp
    mine = [batch for j, batch in enumerate(given) if j % dp == here]
    most: dict[int, tuple[int, int]] = {}
    real = PageRing.allocate

    def allocate(ring: PageRing, count: Tensor, room: int) -> Tensor:
        page_M = real(ring, count, room)
        used = int(ring.allocated - ring.freed)
        most[id(ring)] = max(used, most.get(id(ring), (0,))[0]), ring.pages
        return page_M

    def fewer(*given: Any) -> Pages:
        each = ({row: max(n // cut, 1) for row, n in one.items()} for one in pages_of(*given))
        return Pages(*each)

    with (
        mock.patch.object(PageRing, "allocate", allocate),
        mock.patch.object(executor, "pages_of", fewer),
    ):
        for _ in range(2):  # pages of the first step are those of the second
            figures = gradients(data, mine, 16)
    found = {held.name: held.tensor.clone() for held in data.gradients()}
    if parts.offload is not None and parts.offload.stash is not None:
        stash = parts.offload.stash
        rings = [*stash.rings.values(), *stash.host.values()]
        assert all(int(ring.allocated) == int(ring.freed) for ring in rings), "pages are lost"
    return Step(found, figures.needed_load, list(most.values()))


def compared(rank: int, cases: tuple[Asked, ...]) -> list[tuple[Any, ...]]:
    """Return, of each layout, what differs with enough pages, and with too few."""
    found: list[tuple[Any, ...]] = []
    for asked in cases:
        world = World.open(Folding(Layout.model_validate(asked.layout).split, 4), "cpu", 60)
        run = partial(step_of, asked, world, model=small(), given=batches(8))
        plain, paged, short = run(load=None), run(load=4.0), run(load=1.0, cut=3)
        wrong = [n for n, g in plain.gradients.items() if not torch.equal(g, paged.gradients[n])]
        error = max(relative(short.gradients[n], g) for n, g in plain.gradients.items())
        found.append((len(plain.gradients), wrong, paged.load, error, short.load, paged.most))
    return found


def check(cases: tuple[Asked, ...]) -> None:
    """Hold steps to the bits without pages, and short of pages to the exact step."""
    by_rank = run_ranks(compared, 4, cases, time_out_s=240)
    assert all(any(found[at][-1] for found in by_rank) for at in range(len(cases)))
    for rank, found in enumerate(by_rank):
        for asked, one in zip(cases, found, strict=True):
            number, wrong, lacked, error, short, most = one
            assert number and not wrong and not lacked, (rank, asked, wrong, lacked)
            assert short > 1 and all(0 < used <= n for used, n in most), (rank, one)
            assert error <= (1e-10 if asked.precision == "fp64" else 0.02), (rank, asked, error)


def test_values_are_those_of_rows_that_stay() -> None:
    """To the bit; and a step that lacks pages is made again as the exact one."""
    check(FEW)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(4))
def test_values_are_those_of_rows_that_stay_in_more_layouts(part: int) -> None:
    check(MORE[part::4])


def even() -> Decoder:
    """Return a decoder of four mixtures, each of which sends its experts as many rows."""
    record = small()
    (block,) = (one for one in record.blocks if one.ffn.routing is not None)  # type: ignore[attr-defined]
    stack = Stack(repeat=4, blocks=(evenly(block),))
    return record.model_copy(update={"stacks": (stack,)})


def peaks(rank: int, schedules: tuple[str, ...], spill: float) -> list[Step]:
    """Return the pages of each schedule where every rank has the mean."""
    found, draw = [], torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (2, 16), generator=draw) for _ in range(4)]
    for kind in schedules:
        sizes = "pp2 vpp2 ep2" if kind in VIRTUAL else "pp2 ep2"
        layout = {"sizes": sizes, "schedule": kind, "zero": 0, "dispatch": PADDED}
        asked = Asked(layout, spill=spill)
        world = World.open(Folding(Layout.model_validate(asked.layout).split, 4), "cpu", 60)
        given = [from_ids(one) for one in ids for _ in range(2)]
        found.append(step_of(asked, world, 1.0, even(), given))
    return found


def check_peaks(schedules: tuple[str, ...], spill: float) -> None:
    """Hold the most pages in use to all that there are; of pairs to one layer fewer."""
    for rank, found in enumerate(run_ranks(peaks, 4, schedules, spill, time_out_s=120)):
        for kind, step in zip(schedules, found, strict=True):
            assert not step.load and step.most, (rank, kind, step)
            for used, pages in step.most:
                assert used <= pages and (used == pages or kind in PAIRS), (rank, kind, step.most)


def test_the_most_pages_are_those_planned() -> None:
    check_peaks(("zb_h1", "gpipe"), 1)


@pytest.mark.matrix
@pytest.mark.parametrize("spill", [0, 0.5, 1])
def test_the_most_pages_of_any_schedule_are_those_planned(spill: float) -> None:
    check_peaks(SCHEDULES, spill)
