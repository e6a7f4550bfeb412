"""``moefold bench``: small steps tell the parts apart; the command writes a file plans can use."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moefold.cli.main import main
from moefold.planner.hardware import Machine
from moefold.planner.task import task_from_run
from moefold.planner.time import estimate_time
from moefold.run import load_run
from moefold.training import calibrate, memory_bench
from moefold.training.calibrate import (
    SMALL_MODELS,
    build_step,
    fit_machine,
    measure_kernels,
    planned_seconds,
    time_calls,
)
from tests.pure.test_planner_machine import MACHINE

TRUE = {"compute": 1.5, "memory": 3.0, "launch": 6.0, "optimizer": 2.0, "step": 4.0}


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_parts_of_a_step_are_told_apart(form: str) -> None:
    """Of steps made of known shares of each part, unseen ones are predicted within a tenth."""
    cases = [small.case(form, MACHINE) for small in SMALL_MODELS]
    steps = [
        sum(f * t for f, t in zip(planned_seconds(c), TRUE.values(), strict=True)) for c in cases
    ]
    unseen = slice(3, 5)
    seen = [i for i in range(len(cases)) if i not in (3, 4)]
    found = fit_machine(MACHINE, [cases[i] for i in seen], [steps[i] for i in seen])
    for one, wanted in zip(cases[unseen], steps[unseen], strict=True):
        after = estimate_time(replace(one, cluster=found.cluster)).seconds
        assert after == pytest.approx(wanted, rel=0.1)
        assert estimate_time(one).seconds < 0.7 * wanted, "it was not so before"


def test_steps_are_run_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert set(time_calls(calls, 2)) == {"a", "b"}
    assert order == ["a", "b"] * 3, "once to warm up, then round by round"


def test_a_small_step_runs() -> None:
    step = build_step(SMALL_MODELS[0].case("fp32", MACHINE))
    step()
    step()


def step_of(file: Path) -> float:
    """Return the seconds of a step of ``tiny`` on a machine file's cluster."""
    task, layout = task_from_run(load_run("tiny"), Machine.read(file).cluster, load=1.0)
    return estimate_time(task.case(layout)).seconds


def test_the_command_writes_a_machine_and_shows_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the kernels' rates given: measuring them takes long."""
    monkeypatch.setattr(calibrate, "measure_kernels", lambda *words: MACHINE)
    monkeypatch.setattr(calibrate, "SMALL_MODELS", SMALL_MODELS[:2])
    file = tmp_path / "machine.json"
    assert main(["bench", "tiny", "--rounds", "1", "--machine", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    step = said["steps"]["tiny"]
    assert step["planned_s"] > 0 and step["measured_s"] > 0
    assert step["off"] == pytest.approx(step["planned_s"] / step["measured_s"] - 1)
    tables = Machine.read(file).tables  # of the format that precision: auto is on this machine
    assert any("factors" in table for table in tables.values())
    assert main(["bench", "tiny", "--rounds", "1", "--machine", str(file)]) == 0
    assert "planned" in capsys.readouterr().out
    # A plan reads the file.
    assert main(["plan", "tiny", "--cluster", str(file), "--load", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["cluster"]["device"] == "CPU" and planned["best"]["step_time_s"] > 0
    assert planned["given"]["step_time_s"] == pytest.approx(step_of(file), rel=1e-9)


@pytest.mark.parametrize("words", [["--layout", "tp2"], ["--world", "2"], ["--picture", "x.png"]])
def test_what_belongs_to_memory_is_not_passed_over(words: list[str], capsys: Any) -> None:
    assert main(["bench", "tiny", *words]) == 2
    assert f"{words[0]} needs --memory" in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_are_measured() -> None:
    machine = measure_kernels("this", "torch", 2**30)
    assert machine.bandwidth > 1e8 and machine.fp32 > 1e9
    for rates in machine.rates.values():
        assert 0 < rates["gemm"] < 3 and rates["kernel_s"] > 0 and rates["forward_rate"] > 0


def test_memory_is_shown_planned_beside_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one rank: every part, after each action; and drawn."""
    picture = tmp_path / "memory.png"
    command = ["bench", "tiny", "train.precision=fp32", "--memory", "--picture", str(picture)]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["action"][0] for one in said["actions"]} == {"F", "B"}
    for one in said["actions"]:
        planned, executed = one["planned"], one["executed"]
        assert {part: round(planned[part]) for part in said["parts"]} == executed
        assert sum(one["rows"].values()) == planned["activations"]
    assert any(one["executed"]["activations"] for one in said["actions"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "tiny", "train.batch=2", "model.shape.hidden=200000", "--memory"]) == 2
    assert "this machine has" in capsys.readouterr().err


def test_one_rank_of_many_is_shown_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its layers in its place, with bytes after each action to the byte, and its exchanges."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = "bench tiny train.precision=fp32 train.batch=1024 --world 2048 --rounds 1 --rank 1700"
    words = [*command.split(), "--layout", "pp2 tp2 ep4"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["place"]["pp"] == 1 and facts["stage"] == "stage tL" and facts["factor"] == 1
    assert facts["bytes"]["activations"][0] == facts["bytes"]["activations"][1] > 0
    assert facts["bytes"]["messages"][0] == facts["bytes"]["messages"][1]
    exchanges = facts["exchanges"]
    for kind in ("tp", "dispatch", "dp"):
        assert exchanges[kind]["seconds"] > 0 < facts["planned_seconds"][kind]
    assert not exchanges["cp"]["bytes"]
    assert facts["seconds"]["forward"] > 0 and facts["copy_seconds"] > 0
    assert "passes" not in facts["planned_seconds"]  # this CPU was not measured
    assert main([*words, "--shrink", "4"]) == 0
    said = capsys.readouterr().out
    assert "rank 1,700 of 2,048" in said and "sizes divided by 4" in said
    assert "run `moefold bench` once" in said and "links of H100" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("tiny --rank 0 --memory", "leave one out"),
        ("tiny --shrink 2", "--shrink needs --rank"),
        ("tiny --links-of h100", "--links-of needs --rank"),
        ("tiny demo --rank 0", "leave demo out"),
        ("tiny --rank 0 --links-of h10", "H100"),
        ("tiny --rank 9 --world 8 layout.sizes=ep3", "nearest: 7"),
    ],
)
def test_what_is_wrong_with_one_rank_is_said(words: str, why: str, capsys: Any) -> None:
    assert main(["bench", *words.split()]) == 2
    assert why in capsys.readouterr().err


def test_figures_of_memory_are_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not cut off, as a table that is wider than its terminal is."""
    monkeypatch.setenv("COLUMNS", "60")
    bytes_of = dict.fromkeys(memory_bench.PARTS, 123_456_789)
    held = SimpleNamespace(rank=0, action="F0", planned=bytes_of, executed=bytes_of)
    monkeypatch.setattr(memory_bench, "compare_bytes", lambda run, world: [held])
    assert main(["bench", "tiny", "--memory"]) == 0
    said = capsys.readouterr().out
    assert said.count("123.46 123.46") == len(memory_bench.PARTS) and "…" not in said
