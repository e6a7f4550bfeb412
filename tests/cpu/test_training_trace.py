"""Parts of a traced step: of operators, of exchanges, of ranks; planned ones; and the command."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import main
from moefold.comm.recorder import BACKWARD, CallRecord, CallSite, OpenCall, TimedCall
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.planner.hardware import Cluster
from moefold.planner.task import task_from_run
from moefold.planner.time import estimate_time
from moefold.planner.walls import (
    OTHER_STAGES,
    RankWalls,
    StepWalls,
    best_change,
    changes_against,
    planned_walls,
)
from moefold.run import load_run
from moefold.training import walls_bench
from moefold.training.trace import (
    Operator,
    begun_by_all,
    blocked_layers,
    expert_load,
    partition,
    split_waits,
    work_layers,
)
from tests.pure.test_planner_machine import MACHINE

MAIN = 1
LANE = 2


def timed(
    key: tuple[str, int],
    begun: float,
    since: float,
    ended: float,
    label: str = "gradients",
    direction: str = "forward",
    ranks: tuple[int, ...] = (0, 1),
    thread: int = MAIN,
) -> TimedCall:
    """Return an operation that the rank was blocked in from ``since`` on."""
    site = CallSite(label, "all_to_all", "ep", direction)
    record = CallRecord(*key, site, (1,), "float32", 4)
    return TimedCall(OpenCall(record, ranks, since, True, begun), ended, thread)


def seconds_of(layers: list[tuple[str, list[tuple[float, float]]]]) -> dict[str, float]:
    """Return the seconds of a window of ten by part."""
    return {name: seconds for name, seconds in partition((0, 10), layers).items() if seconds}


def test_operators_are_counted_without_those_that_they_call() -> None:
    """A sum has a kernel beside the views that it calls; a linear layer has none."""
    operators = [
        Operator("aten::linear", 0, 3), Operator("aten::addmm", 1, 2.5),
        Operator("aten::sum", 4, 7), Operator("aten::as_strided", 5, 5.5),
        Operator("moefold::_product", 8, 9),
    ]  # fmt: skip
    found = seconds_of(work_layers(operators))
    assert found == {"products": 2.5, "memory": 2.5, "host": 5}


def test_kernels_that_overlap_are_counted_once() -> None:
    """On a device a copy beside a product takes nothing from the step."""
    kernels = [Operator("nvjet_tst_256x128", 1, 4), Operator("vectorized_elementwise", 3, 6)]
    assert seconds_of(work_layers(kernels, nested=False)) == {"products": 3, "memory": 2, "host": 5}


def test_a_wait_for_a_late_rank_is_no_exchange() -> None:
    """Until the last rank has begun, the others wait: for experts, other stages, or the rank."""
    calls = [
        timed(("a", 1), 0, 0, 2), timed(("a", 2), 3, 3, 5, label="layers.0.moe.combine"),
        timed(("p", 1), 6, 6, 7, ranks=(0, 2)),
        timed(("a", 3), 8, 8, 9, label="layers.0.moe.dispatch", direction=BACKWARD),
    ]  # fmt: skip
    arrivals = {("a", 1): 1.5, ("a", 2): 4.0, ("p", 1): 6.75, ("a", 3): 8.5}
    layers, _ = blocked_layers(calls, arrivals, [], Folding(Sizes(pp=2), 4), MAIN)
    parts = {"ranks": 1.5, "experts": 1.5, OTHER_STAGES: 0.75, "exchange": 2.25, "host": 4}
    assert seconds_of(layers) == parts


def test_only_what_the_computing_thread_waits_for_is_exposed() -> None:
    """Of an exchange on the other lane, and of a gather that began earlier, the rest is hidden."""
    calls = [timed(("a", 1), 0, 0, 4, thread=LANE), timed(("b", 1), 5, 8, 9)]
    arrivals = {("a", 1): 0.0, ("b", 1): 5.5}
    layers, running = blocked_layers(calls, arrivals, [(3, 4)], Folding(Sizes(), 2), MAIN)
    assert seconds_of(layers) == {"exchange": 2, "host": 8}
    assert running == [(0, 4), (8, 9)]
    # The back end's thread says how long the gather ran.
    assert begun_by_all([(5.2, 7)], calls, arrivals) == [(5.5, 7)]


def test_waits_in_kernels_are_told_by_comparing_ranks() -> None:
    ranks = [RankWalls(pp, 10, {"exchange": s}, 0, 0) for pp, s in ((0, 1), (0, 3), (1, 4), (1, 5))]
    parts = [rank.parts for rank in split_waits(ranks)]
    assert parts[1] == {"exchange": 1, OTHER_STAGES: 0, "ranks": 2}
    assert parts[3] == {"exchange": 1, OTHER_STAGES: 3, "ranks": 1}


def walls_of(*ranks: tuple[int, dict[str, float]]) -> StepWalls:
    """Return the walls of ranks of stages, with a second's step each."""
    return StepWalls(tuple(RankWalls(pp, 1, parts, 0, 0) for pp, parts in ranks))


def test_the_wall_of_a_step() -> None:
    """A large loss before work; waits for other stages are imbalance, and beyond it the bubble."""
    assert walls_of((0, {"products": 0.8, "host": 0.2})).wall == "products"
    assert walls_of((0, {"products": 0.7, "host": 0.3})).wall == "host"
    bubble = walls_of(
        (0, {"products": 0.6, OTHER_STAGES: 0.4}), (1, {"products": 0.5, OTHER_STAGES: 0.5})
    )
    assert bubble.wall == "bubble"
    assert bubble.parts["stages"] == pytest.approx(0.05)
    assert bubble.parts["bubble"] == pytest.approx(0.4)
    slow = walls_of((0, {"host": 0.9, "products": 0.1}), (0, {"products": 0.1, "ranks": 0.9}))
    assert slow.wall in ("host", "ranks")
    three = walls_of(*((rank.pp, dict(rank.parts)) for rank in (*slow.ranks, slow.ranks[1])))
    assert three.wall == "ranks" and "rank 0 waits least" in three.evidence
    assert "waits for the host takes 0.6 s more" in three.evidence
    assert StepWalls.from_json(json.loads(json.dumps(three.to_json()))) == three


def test_the_load_of_experts() -> None:
    layers = [{"layer": 1, "load": [0.5, 0.25, 0.25, 0]}, {"layer": 3, "load": [0.25] * 4}]
    assert expert_load(layers, 2) == (1.25, (1, 0, 2.0))
    assert expert_load([], 2) == (1.0, None)


def test_planned_walls_add_up_to_the_planned_step() -> None:
    """With a hot expert and a heavy stage; what is against each makes its part smaller."""
    device = replace(MACHINE.device, link_bandwidth=1e9, nic_bandwidth=1e9)
    run = load_run("tiny", ["layout.sizes=pp2 ep2", "layout.stages=Ett|L", "train.batch=16"])
    task, layout = task_from_run(run, Cluster(device, 4, 1, 1), load=2.0)
    case = task.case(layout)
    parts, hidden = planned_walls(case)
    assert sum(parts.values()) == pytest.approx(estimate_time(case).seconds)
    assert min(parts.values()) >= 0 <= hidden
    assert parts["experts"] > 0 and parts["stages"] > 0
    for wall, words in (("stages", "stages by weight"), ("experts", "clones")):
        change = best_change(task, case, wall)
        assert change is not None and change.saved_share > 0
        assert planned_walls(change.case)[0][wall] < parts[wall]
        further = list(changes_against(task, case, wall))
        assert further and all(description.startswith(words) for description, _ in further)
        for _, changed in further:
            assert planned_walls(task.case(*changed))[0][wall] < parts[wall]


def test_the_command_names_the_wall_of_a_slow_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    MACHINE.write(file)
    monkeypatch.setattr(walls_bench, "default_machine_file", lambda: file)
    run_step = walls_bench.gradients

    def late(*args: Any) -> Any:
        time.sleep(0.5)
        return run_step(*args)

    monkeypatch.setattr(walls_bench, "gradients", late)
    command = ["bench", "tiny", "data.seq=32", "--walls", "--rounds", "1"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["wall"] == "host" and said["parts"]["host"] >= 0.5
    assert sum(said["parts"].values()) == pytest.approx(said["seconds"], rel=0.03)
    assert sum(said["planned"]["parts"].values()) == pytest.approx(said["planned"]["seconds"])
    monkeypatch.setattr(walls_bench, "gradients", run_step)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].startswith("wall: ") and "the planner" in shown
    assert main(["bench", "tiny", "demo", "--walls"]) == 2
    assert "leave demo out" in capsys.readouterr().err
