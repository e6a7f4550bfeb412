"""All commands read the same run from the same words, and try their output before long work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moefold.cli.bench
import moefold.cli.explain
import moefold.cli.plan
import moefold.cli.report
import moefold.cli.train
from moefold.cli.main import main
from moefold.proof import verify as proving
from moefold.run import Run
from moefold.training import calibrate, memory_bench


class Seen(Exception):
    """A command has read its run."""


def record(runs: list[Run]) -> Callable[..., Any]:
    """Return a function that keeps the run among its arguments, and ends the command."""

    def stop(*values: Any, **_: Any) -> None:
        runs.extend(value for value in values if isinstance(value, Run))
        runs.extend(run for value in values if isinstance(value, dict) for run in value.values())
        raise Seen

    return stop


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, ...]]:
    """Return a function that runs a command up to the run that it reads."""
    runs: list[Run] = []
    stop = record(runs)
    monkeypatch.setenv("MOEFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(proving, "cases_of", stop)
    monkeypatch.setattr(memory_bench, "compare_bytes", stop)
    monkeypatch.setattr(calibrate, "calibrate", stop)
    monkeypatch.setattr(moefold.cli.explain, "derived_values", lambda loaded: stop(loaded.record))
    monkeypatch.setattr(moefold.cli.train, "require_fit", stop)

    def run(command: str, *words: str) -> tuple[Any, ...]:
        runs.clear()
        with pytest.raises(Seen):
            main([*command.split(), *words])
        (found,) = runs
        return found.layout.sizes, found.layout.zero, found.train.steps, found.seed

    return run


WORDS = (
    ("tiny", "train.steps=4", "--layout", "tp2", "seed=3"),
    ("--layout", "tp2", "tiny", "train.steps=4", "seed=3"),
    ("tiny", "--layout", "tp2", "train.steps=4", "seed=3"),
    ("train.steps=4", "tiny", "--layout", "tp2", "seed=3"),
    ("tiny", "train.steps=9", "layout.sizes=cp2", "--layout", "tp2", "train.steps=4", "seed=3"),
    ("tiny", "seed=1", "seed=3", "train.steps=4", "--layout", "tp2"),
)


@pytest.mark.parametrize("command", ["train", "explain", "verify", "bench --memory"])
@pytest.mark.parametrize("words", WORDS)
def test_all_commands_read_one_run_from_the_same_words(
    read: Callable[..., tuple[Any, ...]], command: str, words: tuple[str, ...]
) -> None:
    assert read(command, *words) == ("tp2", 1, 4, 3)


def test_bench_takes_overrides_of_step_times_too(read: Callable[..., tuple[Any, ...]]) -> None:
    assert read("bench", "tiny", "--rounds", "1", "train.steps=4", "seed=3") == ("", 1, 4, 3)


@pytest.mark.parametrize("command", ["train", "explain", "verify", "bench --memory"])
def test_a_run_that_is_legal_in_the_given_layout_alone(
    read: Callable[..., tuple[Any, ...]], command: str
) -> None:
    stages = "layout.stages=Et|tL"
    words = ("tiny", stages, "model.shape.layers=2", "--layout", "pp2")
    assert read(command, *words)[0] == "pp2"


def test_two_runs_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "explain tiny demo",
        "bench --memory tiny demo",
        "plan tiny demo --cluster h100x8",
    ):
        assert main(command.split()) == 2
        assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["/proc/x.html", "missing/x.html", ".", "/dev/null/x.html"])
def test_an_output_file_is_tried_before_the_work(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse = record([])
    monkeypatch.setattr(moefold.cli.plan, "planned", refuse)
    monkeypatch.setattr(calibrate, "calibrate", refuse)
    monkeypatch.setattr(memory_bench, "compare_bytes", refuse)
    monkeypatch.setattr(moefold.cli.report, "render_report", refuse)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "lm_loss": 2.0}\n')
    (tmp_path / "routing").mkdir()
    for command in (
        f"plan tiny --cluster cpu --html {file}",
        f"bench --memory tiny --picture {file}",
        f"report run --html {file}",
        f"routing routing --out {file}",
    ):
        assert main(command.split()) == 2, command
        assert file in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["routing", "run"]
    for command in ("bench tiny --machine /proc/x.json", "bench tiny --machine run"):
        assert main(command.split()) == 2
        assert command.split()[-1] in capsys.readouterr().err
