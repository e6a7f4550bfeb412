"""A rank without the others exchanges what it does among real ranks, operation by operation."""

import json
from typing import Any

import pytest

from moefold.comm.lone import lone_world
from moefold.comm.recorder import CallSite, Total
from moefold.comm.world import World
from moefold.planner.case import Case
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.task import task_from_run
from moefold.run import Run, load_run
from moefold.training.rank_bench import EXCHANGES, kind_of
from moefold.training.rank_step import RankStep
from moefold.training.rank_task import require_rank
from tests.gloo.harness import run_ranks

Totals = dict[CallSite, Total]
LAYOUTS: list[tuple[str, list[str]]] = [
    ("ep8", ["model.shape.experts=8"]),
    ("", ["layout.zero=0"]),
    ("", ["layout.zero=2", "layout.zero_ranks=4"]),
    ("ep4", ["layout.zero=3"]),
    ("ep2", ["layout.zero=1", "optim={kind: muon}"]),
    ("tp2 ep4", ["layout.dispatch=alltoall"]),
    ("ep2 etp2 tp2", ["layout.dispatch=allgather"]),
    ("ep4", ["layout.dispatch={kind: two_level, node: 2}"]),
    ("ep4", ["layout.dispatch={kind: padded, max_rows: 128}"]),
    ("ep4", ["layout.dispatch={kind: spread, max_rows: 160}"]),
    ("ep4", ["layout.clones={slots: 1}", "layout.dispatch=alltoall"]),
    ("cp4 ep4", ["layout.context=ring"]),
    ("cp2 tp2 ep2", ["layout.context=all_gather"]),
    ("cp2 ep2", ["layout.context=all_to_all"]),
    ("cp4 ep2", ["layout.context={kind: mixed, heads: 2}"]),
    ("pp2 tp2 ep2", ["layout.recompute=full"]),
    ("pp4 ep2", ["layout.schedule=zb_h1"]),
    ("pp2 vpp2 ep2", ["layout.schedule=interleaved"]),
    ("pp2 vpp2 ep2", ["layout.schedule=zb_v"]),
    ("pp2 vpp2 ep4", ["layout.schedule=dualpipe_v"]),
    ("pp2 ep2", ["layout.schedule=merged"]),
    ("ep2", ["layout.schedule=merged", "layout.dispatch=alltoall_once"]),
    ("pp2 ep2", ["layout.stages=Et|(tt)tL", "model.tied=true"]),
    ("ep2", ["layout.state={at: host}"]),
]
"""Layouts of eight ranks, with changes of a run."""
SMALL = ["train.precision=fp32", "train.batch=32", "model.shape.layers=4", "train.micro_batch=1"]


def step_of(sizes: str, changes: list[str], ranks: int) -> tuple[Run, Case]:
    """Return a small run and its step."""
    run = load_run("tiny", [f"layout.sizes={json.dumps(sizes)}", *SMALL, *changes])
    require_rank(run, 0, ranks)
    task, layout = task_from_run(run, Cluster(cpu_device(1e10, 1e10, 1 << 34), ranks, 8, 8), load=1)
    return run, task.case(layout)


def among_others(rank: int, run: Run, case: Case) -> Totals:
    """Return the exchanges of a rank among real ones."""
    with World.open(case.folding, "cpu", 60) as world:
        return RankStep(world, run, case).totals()


def alone(rank: int, run: Run, case: Case) -> Totals:
    """Return the exchanges of a rank without the others."""
    with lone_world(case.folding, rank) as world:
        return RankStep(world, run, case).totals()


def test_a_rank_sends_as_many_bytes_alone() -> None:
    run, case = step_of("tp2 ep2", ["model.shape.layers=1", "train.batch=2"], 2)
    real = run_ranks(among_others, 2, run, case)
    for rank, totals in enumerate(real):
        assert alone(rank, run, case) == totals
        kinds = {kind_of(site): total.bytes for site, total in totals.items()}
        assert kinds["dispatch"] and kinds["dp"] and kinds.keys() <= set(EXCHANGES)


@pytest.mark.matrix
@pytest.mark.parametrize(("sizes", "changes"), LAYOUTS)
def test_eight_ranks_send_as_many_bytes_alone(sizes: str, changes: list[str]) -> None:
    run, case = step_of(sizes, changes, 8)
    real: list[Any] = run_ranks(among_others, 8, run, case, time_out_s=120.0)
    for rank, totals in enumerate(real):
        assert alone(rank, run, case) == totals
