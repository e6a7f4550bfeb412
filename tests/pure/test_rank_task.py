"""What one rank of a large layout runs alone: refused, made small, and priced, without torch."""

import pytest

from moefold.config.errors import RunError
from moefold.moe.config import Moe
from moefold.moe.dispatch.config import FixedShape
from moefold.planner.case import Case
from moefold.planner.hardware import cpu_device, device_by_name
from moefold.run import Run, load_run
from moefold.training.rank_task import LoneRank, linked, make_lone_rank, require_rank, smaller

LARGE = 'layout.sizes="pp16 ep64"'
HOST = 1 << 34


def task_of(run: Run, rank: int, world: int, factor: int | None = None) -> LoneRank:
    """Return a rank's task on CPUs that are connected as H100 are."""
    cluster = linked(cpu_device(3e10, 1e10, HOST), device_by_name("h100"), world)
    return make_lone_rank(run, rank, cluster, HOST, factor)


def test_all_that_is_wrong_with_a_rank_is_said_at_once() -> None:
    run = load_run("deepseek_v3", [LARGE])
    with pytest.raises(RunError) as caught:
        require_rank(run, 2000, 2000, 0)
    found = {violation.path: violation.nearest for violation in caught.value.violations}
    assert found == {("world",): 2048, ("rank",): 1999, ("shrink",): 1}
    require_rank(run, 2047, 2048)


@pytest.mark.parametrize(
    ("changes", "ranks", "path", "nearest"),
    [
        (["layout.sizes=ep2", "layout.dispatch=deep_ep"], 2, "layout.dispatch", "alltoall_once"),
        (["train.batch=4"], 3, "train.batch", 6),
        (["layout.sizes=pp2 vpp2", "model.shape.layers=4", "layout.schedule=dualpipe_v",
          "train.batch=6"], 2, "train.batch", 8),
    ],
)  # fmt: skip
def test_what_no_rank_can_run_alone_is_refused_with_what_it_can(
    changes: list[str], ranks: int, path: str, nearest: object
) -> None:
    with pytest.raises(RunError) as caught:
        require_rank(load_run("tiny", changes), 0, ranks)
    found = {".".join(map(str, each.path)): each.nearest for each in caught.value.violations}
    assert found == {path: nearest}


def test_a_smaller_step_has_the_layers_the_layout_and_the_schedule_of_the_run() -> None:
    task = task_of(load_run("deepseek_v3", [LARGE]), 17 + 5 * 128, 2048)
    case, full = task.case, task.full
    assert task.factor > 1 and task.pipeline_rank == 5
    assert case.decoder.hidden == full.decoder.hidden // task.factor
    assert case.seq == full.seq // task.factor
    assert case.num_micro_batches == 32 < full.num_micro_batches
    assert case.stages == full.stages and case.schedule == full.schedule
    for block, before in zip(case.decoder.blocks, full.decoder.blocks, strict=True):
        heads, heads_before = (getattr(b.attention, "heads", None) for b in (block, before))
        assert heads == heads_before is not None
        width, width_before = (getattr(b.ffn, "width", 0) for b in (block, before))
        assert width < width_before
    mixture, before = case.decoder.blocks[-1].ffn, full.decoder.blocks[-1].ffn
    assert isinstance(mixture, Moe) and isinstance(before, Moe)
    assert mixture.router == before.router
    assert mixture.shared is not None and before.shared is not None
    assert mixture.shared.width < before.shared.width
    assert task.memory.peak_allocated < HOST / 2
    assert task.memory.rank == 5


def test_rooms_of_rows_shrink_with_the_rows() -> None:
    run = load_run("tiny", ["layout.sizes=ep2", "layout.dispatch={kind: padded, max_rows: 320}"])
    case = task_of(run, 0, 2).full
    dispatch = smaller(case, 4).layout.dispatch
    assert isinstance(dispatch, FixedShape)
    assert dispatch.max_rows == 80


def test_a_step_that_is_too_large_for_the_machine_says_so() -> None:
    run = load_run("deepseek_v3", [LARGE])
    with pytest.raises(ValueError, match=r"divided by 1: rank 17 needs .* GB, .*; divide by more"):
        task_of(run, 17, 2048, factor=1)


def price(task: LoneRank, op: str, ranks: tuple[int, ...], sent: int = 10**9) -> float:
    """Return the seconds of one operation in which a rank sends a gigabyte."""
    return task.exchange_seconds(op, sent, 1, ranks)


def test_exchanges_cost_what_their_links_carry() -> None:
    """Inside a node 450 GB/s at most, and 50 between nodes; a sum is a scatter and a gather."""
    task = task_of(load_run("tiny", ["layout.sizes=ep4", "train.batch=64"]), 0, 32)
    near, far = tuple(range(8)), tuple(range(0, 32, 8))
    assert 1 / 450 < price(task, "all_gather", near) < 1 / 300
    assert 1 / 50 < price(task, "all_to_all", far) < 1 / 30
    assert price(task, "send", far) == pytest.approx(price(task, "all_to_all", far), rel=0.01)
    assert price(task, "all_reduce", near) == pytest.approx(
        price(task, "reduce_scatter", near), rel=0.01
    )
    assert price(task, "receive", near, 0) == 0
    case: Case = task.case
    assert case.cluster.device.cpu and case.cluster.devices == 32
