"""What the rules of a device ask of a step, shown on one rank of a layout without the others."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from no_values import META, ROWS, apart, data_of, micro_batch

from moefold.comm.lone import lone_world
from moefold.mesh.folding import Folding
from moefold.moe.topk import stable_topk
from moefold.parallel import limits
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.limits import missing_room
from moefold.parallel.pipeline import lanes
from moefold.training.step import gradients
from tests.cpu.alive import StorageRecorder
from tests.cpu.small import GQA, decoder, moe

ROW_BYTES = 34
"""Most that a row may hold to the end of a step: its id, label, position and number of 8 bytes
each, whether it is valid, and its share of the micro-batch's loss and terms."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """While a test runs, what refers to itself stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


RECORD = decoder(GQA, moe(), moe())
SHARED: list[tuple[str, int, int, dict[str, Any]]] = [
    ("", 1, 0, {}),
    ("", 2, 0, {"zero": 0}),
    ("", 2, 1, {"zero": 0}),
    ("tp2", 4, 2, {"zero": 0}),
    ("ep2", 4, 3, {"zero": 0}),
    ("", 4, 2, {"zero": 1, "zero_ranks": 2}),
    ("pp2", 2, 1, {"zero": 1}),
    ("pp2", 2, 0, {"stages": "E|(tt)L"}),
]


def test_pairs_cut_no_groups_that_their_exchanges_say_nothing_over() -> None:
    """Those of context ranks in two levels, which are not the ranks of experts."""
    more: dict[str, Any] = {"context": {"kind": "mixed", "heads": 2}, "schedule": "merged"}
    with apart():
        data = data_of(RECORD, Layout.model_validate({"sizes": "cp4 ep2", **more}), 4)
    world, beside = data.parts.world, data.parts.secondary
    assert beside is not None and beside is not world
    assert [group.size for group in world.split("cp", 2)] == [2, 2]


def test_a_table_on_two_stages_is_summed_over_them_last() -> None:
    """Before data ranks' sums, of which each stage makes its own in its own order, its copies would
    drift apart: ``pp2`` on eight ranks with ``zero: 0`` and further tokens did."""
    layout = Layout(sizes="pp2", zero=0)
    with lone_world(Folding(layout.split, 8), 0) as world:
        data = ShardedState(build_parts(decoder(GQA, moe(), tied=True), "fp32", layout, world))
        data.begin_step(1)
        data.finish()
        said = [record.site.group.split("+")[0] for record in world.recorder.last(2)]
    assert said == ["dp", "pp"]


@pytest.mark.parametrize(("sizes", "ranks", "rank", "more"), SHARED)
@pytest.mark.parametrize("trained", [True, False])
def test_every_rank_states_its_share_of_the_norm_on_its_device(
    sizes: str, ranks: int, rank: int, more: dict[str, Any], trained: bool
) -> None:
    """Where it counts no parameter too: those that hold copies alone, and with nothing trained."""
    with apart():
        data = data_of(RECORD, Layout(sizes=sizes, **more), ranks, rank)
        for parameter in data.params.values():
            parameter.requires_grad_(trained and parameter.requires_grad)
        data.begin_step(1)
        assert data.finish().device == META


DISPATCHERS: dict[str, Any] = {
    "alltoall": "alltoall",
    "alltoall_once": "alltoall_once",
    "two_level": {"kind": "two_level", "node": 1},
    "allgather": "allgather",
    "padded": {"kind": "padded", "max_rows": ROWS},
}


@pytest.mark.parametrize("recompute", [None, "full", {"kind": "selective", "modules": ["experts"]}])
@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_what_lanes_hand_on_is_on_the_rows_device(dispatch: str, recompute: Any) -> None:
    """CUDA's allocator is told of the other stream, which it takes no tensor of the host for."""
    handed, now = Counter[torch.device](), lanes._wait

    def noted(state: Any) -> lanes.State:
        left = now(state)
        handed.update(value.device for value in left if isinstance(value, torch.Tensor))
        return left

    layout = {"dispatch": DISPATCHERS[dispatch], "recompute": recompute, "schedule": "merged"}
    with apart(), mock.patch.object(lanes, "_wait", noted):
        data = data_of(RECORD, Layout(sizes="ep2", zero=0, **layout), 2)
        gradients(data, [micro_batch()] * 3, 8)
    assert handed[META] > 100 and set(handed) == {META}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("layout", [{}, {"recompute": "full"}, {"schedule": "merged"}])
def test_micro_batches_that_are_done_keep_their_rows_alone(layout: dict[str, Any]) -> None:
    """Whatever layers and experts there are: a step may have any number of micro-batches."""
    rows, kept = 256, list[int]()

    def note(*given: Any) -> torch.Tensor:
        kept.append(sum(n for ref, n in made.storages.values() if not ref.expired()))
        return missing_room(*given)

    with apart(), mock.patch.object(limits, "missing_room", note):
        data = data_of(RECORD, Layout(**layout), 1)
        for micro_batches in (2, 2, 8):
            batches = [micro_batch(rows) for _ in range(micro_batches)]
            with StorageRecorder() as made:
                gradients(data, batches, 64)
    each = (kept[2] - kept[1]) / (8 - 2) / rows
    assert 0 < each <= ROW_BYTES, kept


def test_the_choice_of_experts_keeps_no_more_than_it_says() -> None:
    """And not the whole order of all experts behind a view of its head."""
    chosen_TK = stable_topk(torch.empty(ROWS, 128, device=META), 8)
    assert chosen_TK.untyped_storage().nbytes() == chosen_TK.numel() * 8
