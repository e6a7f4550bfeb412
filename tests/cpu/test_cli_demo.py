"""``moefold demo`` as a person types it: its card, and as many steps as fit into its time."""

import re
from pathlib import Path
from typing import Any

import pytest

from moefold.cli import demo
from moefold.cli.main import main
from tests.cpu.test_cli_train import run_file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder to work in, where the demo's recipe is one of seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moefold.cli.demo.RECIPE", str(run_file(tmp_path, name="demo")))
    monkeypatch.setattr("moefold.cli.demo.program", lambda: "moefold")
    return tmp_path


def test_the_demo_ends_with_a_card(here: Path, capsys: Any) -> None:
    """Shrunk to seconds: the result beside the baselines, the folder, four commands that parse."""
    (here / "runs" / "demo").mkdir(parents=True)
    (here / "runs" / "demo" / "kept").touch()
    assert main(["demo", "seed=2"]) == 0
    banner, _, card = capsys.readouterr().out.rpartition("done")
    said = re.sub(r"[│\s]+", " ", card)
    assert "bits per byte on held-out" in said and "xz -9e" in said and "bigram table" in said
    assert "runs/demo-2/experts.html" in said
    assert [path.name for path in (here / "runs" / "demo").iterdir()] == ["kept"]
    commands = re.findall(r"moefold (sample|report|export|train) ", said)
    assert commands == ["sample", "report", "export", "train"]
    assert re.search(r"steps +\d+ fit into 5:00, at [\d.]+ ms per step as measured", banner)


@pytest.mark.parametrize(("step_s", "steps"), [(0.2, 500), (0.45, 500), (0.9, 250), (9.0, 150)])
def test_as_many_steps_as_fit(step_s: float, steps: int) -> None:
    """A fast machine takes all, a slower one fewer, and none fewer than 150."""
    assert demo.affordable_steps(500, step_s) == steps
    assert demo.affordable_steps(20, step_s) == 20


def test_a_slow_machine_takes_fewer_steps_and_says_so(
    here: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The run that is trained, and saved, is the shorter one; it goes on as that one."""
    monkeypatch.setattr(demo, "measure_step_s", lambda run, cache: 60.0)
    monkeypatch.setattr(demo, "MIN_STEPS", 3)
    assert main(["demo", "--folder", "slow"]) == 0
    said = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    asked = re.search(r"steps 3 of the recipe's (\d+), as a step takes 1:00 on this machine", said)
    assert asked and f"train.steps={asked[1]} runs all" in said
    assert "done step 3," in said
    monkeypatch.delattr(demo, "measure_step_s")  # what has begun is not measured again
    assert main(["demo", "--folder", "slow"]) == 0
    assert "step 3 is done already" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["train.steps=4", "train={steps: 4, batch: 4}"])
def test_steps_that_are_asked_for_are_taken(
    here: Path, monkeypatch: Any, capsys: Any, override: str
) -> None:
    """No machine overrules ``train.steps``."""
    monkeypatch.setattr(demo, "MIN_STEPS", 1)
    monkeypatch.setattr(demo, "STEPS_BUDGET_S", 0)
    assert main(["demo", override]) == 0
    assert "done step 4," in re.sub(r"[│\s]+", " ", capsys.readouterr().out)
