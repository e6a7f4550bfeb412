"""Hooks that write, count and warn, on a job that trains nothing."""

import io
import json
import math
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import SaveError
from moefold.training.hooks.alarms import AlarmHook, HealthHook, RoutingCollapse
from moefold.training.hooks.base import Hook
from moefold.training.hooks.checkpoint import CheckpointHook
from moefold.training.hooks.config import Evaluate, Health, ProgressDisplay
from moefold.training.hooks.evaluate import EvaluateHook
from moefold.training.hooks.logs import EventsHook, MetricsHook, TensorBoardHook
from moefold.training.hooks.progress import ProgressHook
from moefold.training.run_folder import EVENTS_FILE, METRICS_FILE, History
from tests.pure.fake_job import FakeJob, layer

EVEN, ONE_SIDED = [0.25] * 4, [0.5, 0.5, 0.0, 0.0]


def console(terminal: bool = False) -> Console:
    """A console that keeps what it is given."""
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def said(where: Console) -> str:
    """What it was given."""
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_figures_of_earlier_hooks_reach_the_file(tmp_path: Path) -> None:
    """The sink stands behind those that add to the metrics."""
    job = FakeJob(tmp_path, [EvaluateHook(Evaluate(every=4)), MetricsHook()], last_step=10)
    job.go()
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 10]
    assert lines[3]["val/code/bits_per_byte"] == 1.5


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Killed at step 7 after the checkpoint of step 4."""
    FakeJob(tmp_path, [MetricsHook()]).go(steps=7)
    FakeJob(tmp_path, [MetricsHook()]).go(start=4)
    assert [line["step"] for line in History.read(tmp_path).lines] == list(range(1, 11))


def test_checkpoints_come_at_their_steps_and_the_end_is_the_loop_s(tmp_path: Path) -> None:
    """The loop saves the last step itself, however it comes about."""
    job = FakeJob(tmp_path, [CheckpointHook(CheckpointPolicy(every=5), Console())], last_step=10)
    job.go()
    assert job.calls == [("save", 5)]
    job = FakeJob(tmp_path, [CheckpointHook(CheckpointPolicy(every=None), Console())], last_step=10)
    job.go()
    assert job.calls == []


@pytest.mark.parametrize(
    ("load", "record", "words"),
    [
        (EVEN, Health(), ""),
        (ONE_SIDED, Health(), "2 of 4 experts get no token"),
        (ONE_SIDED, Health(dead_share=0.6, load_ratio=3.0), ""),
        ([0.45, 0.45, 0.05, 0.05], Health(), "the busiest expert gets 1.8 times the mean load"),
        ([0.45, 0.45, 0.05, 0.05], Health(load_ratio=1.9), ""),
        ([0.3, 0.3, 0.2, 0.2], Health(), ""),
    ],
)
def test_trouble_is_named(load: list[float], record: Health, words: str) -> None:
    """Without a ratio the limit is 3/4 of E / K, here 1.5."""
    assert HealthHook(record, console()).problem(layer(0, load)) == words


def test_every_expert_chosen_is_no_trouble(tmp_path: Path) -> None:
    """With K = E the load cannot be uneven; 3/4 of the worst would be below the mean."""
    assert HealthHook(Health(), console()).problem(layer(0, EVEN, top_k=4)) == ""


@pytest.mark.parametrize(
    ("action", "calls"),
    [("warn", []), ("checkpoint", [("save", 6)]), ("stop", [("save", 6)])],
)
def test_the_alarm_is_raised_once_after_patience(
    tmp_path: Path, action: str, calls: list[tuple[str, int]]
) -> None:
    """Three checks of two steps each; the layer that is well stays unnamed."""
    record = Health(every=2, patience=3, action=action)  # type: ignore[arg-type]
    out = console()
    save = CheckpointHook(CheckpointPolicy(every=None), out, action == "checkpoint")
    hooks: list[Hook] = [HealthHook(record, out), MetricsHook(), AlarmHook(record), save]
    job = FakeJob(tmp_path, hooks, last_step=20)
    job.layers = [layer(0, EVEN), layer(1, ONE_SIDED)]
    stopped = pytest.raises(RoutingCollapse, match=r"1 layer.* at step 6, .*action is stop")
    with stopped if action == "stop" else nullcontext():
        job.go()
    job.end()
    lines = History.read(tmp_path).lines
    assert [line["step"] for line in lines if line.get("moe/alarms")] == [6]
    assert len(lines) == (6 if action == "stop" else 20)
    assert job.calls == calls
    assert said(out).count("routing alarm") == 1
    assert "step 6, layer 1: 2 of 4 experts get no token in 3 consecutive checks" in said(out)


def test_a_recovered_layer_can_alarm_again(tmp_path: Path) -> None:
    """The count starts anew."""

    class Heal(Hook):
        def on_step(self, job, metrics) -> None:
            job.layers = [layer(0, EVEN if job.step_number == 5 else ONE_SIDED)]

    out = console()
    job = FakeJob(tmp_path, [HealthHook(Health(every=1, patience=3), out), Heal()], last_step=12)
    job.layers = [layer(0, ONE_SIDED)]
    seen = job.go()
    assert [m["step"] for m in seen if m.get("moe/alarms")] == [3, 9]


@pytest.mark.parametrize(("action", "again"), [("warn", []), ("stop", [11, 14])])
def test_checks_that_failed_are_counted_over_a_resume(
    tmp_path: Path, action: str, again: list[int]
) -> None:
    """Also where steps are made again; who goes on after a stop is told once more."""
    record = Health(every=1, patience=3, action=action)  # type: ignore[arg-type]
    states: dict[int, str] = {}

    def go(start: int, steps: int) -> list[int]:
        job = FakeJob(tmp_path, [HealthHook(record, console())], last_step=30, states=states)
        job.layers = [layer(0, ONE_SIDED), layer(1, EVEN)]
        return [m["step"] for m in job.go(steps, start) if m.get("moe/alarms")]

    assert go(5, 2) == []
    assert go(6, 4) == [8]
    assert go(9, 5) == again


def test_health_is_written_flat_and_loads_beside_it(tmp_path: Path) -> None:
    """A key per layer and quantity; the shares of all experts in a file of their own."""
    job = FakeJob(tmp_path, [HealthHook(Health(every=5), console()), MetricsHook()])
    job.layers = [layer(3, ONE_SIDED)]
    job.go()
    history = History.read(tmp_path)
    assert history.lines[4]["moe/3/dead_experts"] == 2
    assert "moe/3/load" not in history.lines[4] and "moe/3/dead_experts" not in history.lines[3]
    found = history.load()
    assert found is not None
    steps, layers, load = found
    assert steps.tolist() == [5, 10] and layers == ["3"]
    assert load[0, 0].tolist() == [2.0, 2.0, 0.0, 0.0]


def test_plain_lines_are_few(tmp_path: Path) -> None:
    """The first step and the last, and nothing between them within the pause."""
    out = console()
    job = FakeJob(tmp_path, [ProgressHook(ProgressDisplay(seconds=60.0), out)], last_step=50)
    job.go()
    lines = said(out).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/50", "step 50/50"]
    assert lines[0].startswith("step 1/50  loss 3.000") and lines[0].endswith("left")


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_without_an_update_are_said_at_once(tmp_path: Path, terminal: bool) -> None:
    out = console(terminal=terminal)
    hook = ProgressHook(ProgressDisplay(seconds=60.0), out)
    job = FakeJob(tmp_path, [hook], last_step=50)
    hook.on_start(job)
    job.step_number = 7
    hook.on_step(job, {"lm_loss": math.nan, "skipped": 1, "skipped_steps": 3})
    job.step_number = 5
    hook.on_rewind(job)
    hook.on_stop(job, None)
    text = re.sub(r"\x1b\[[0-9;?]*\w", "", said(out))
    assert "skipped step 7: loss or gradients are not finite; nothing was updated (3 sk" in text
    assert "rewound to step 5: a step was not finite" in text
    assert not terminal or "5/50" in text


def test_a_terminal_gets_a_bar_and_a_quiet_run_nothing(tmp_path: Path) -> None:
    """The bar ends where the run ends."""
    out = console(terminal=True)
    FakeJob(tmp_path, [ProgressHook(ProgressDisplay(), out)], last_step=5).go()
    assert "5/5" in said(out) and "trial" in said(out) and "step 1/5" not in said(out)
    out = console(terminal=True)
    FakeJob(tmp_path, [ProgressHook(ProgressDisplay(style="off"), out)], last_step=5).go()
    assert said(out) == ""


def test_an_evaluation_is_told_in_bits_per_byte(tmp_path: Path) -> None:
    """As a line of its own, on a terminal too."""
    out = console()
    hooks = [EvaluateHook(Evaluate(every=3)), ProgressHook(ProgressDisplay(seconds=60.0), out)]
    FakeJob(tmp_path, hooks, last_step=3).go()
    assert "validation step 3  loss 2.000  code 1.500 bits per byte" in said(out)
    out = console()
    ProgressHook(ProgressDisplay(), out).on_evaluate(FakeJob(tmp_path, []), {})
    assert said(out) == "", "of no held-out set there is nothing to say"


def test_starts_and_ends_are_noted(tmp_path: Path) -> None:
    """A torn line of a killed process spoils no other."""
    FakeJob(tmp_path, [EventsHook()]).go(steps=3)
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.write('{"event": "sta')
    FakeJob(tmp_path, [EventsHook()]).go(steps=2, start=3)
    events = History.read(tmp_path).events
    assert [(e["event"], e["step"]) for e in events] == [
        ("start", 0), ("stop", 3), ("start", 3), ("stop", 5),
    ]  # fmt: skip
    assert History.read(tmp_path).loss == events[0]["loss"] == "cross_entropy"


def test_a_save_that_the_storage_refuses_is_tried_again_ever_later(tmp_path: Path) -> None:
    refused, out = [True, True, True, True, False, False], io.StringIO()

    def save() -> Path:
        saved.append(job.step_number)
        if refused.pop(0):
            raise SaveError(tmp_path, "disk full", needed=2, free=1)
        return tmp_path

    saved: list[int] = []
    hook = CheckpointHook(CheckpointPolicy(every=10), Console(file=out, width=80))
    job = FakeJob(tmp_path, [hook], last_step=34)
    job.save = save  # type: ignore[method-assign]
    job.go(steps=34)
    assert saved == [10, 11, 13, 17, 20, 30]
    assert re.findall(r"next attempt is at step (\d+)", out.getvalue()) == ["11", "13", "17", "20"]
    stops = CheckpointHook(CheckpointPolicy(every=4, on_failure="stop"), Console(quiet=True))
    refused, job = [True], FakeJob(tmp_path, [stops], last_step=8)
    job.save = save  # type: ignore[method-assign]
    with pytest.raises(SaveError):
        job.go()


def test_a_save_of_an_alarm_that_is_refused_is_tried_again(tmp_path: Path) -> None:
    """It ends no run that goes on without checkpoints, and is due where no other ever is."""

    def save() -> Path:
        saved.append(job.step_number)
        if len(saved) == 1:
            raise SaveError(tmp_path, "disk full", needed=2, free=1)
        return tmp_path

    saved: list[int] = []
    record = Health(every=3, patience=1, action="checkpoint")
    alarms = [HealthHook(record, console()), AlarmHook(record)]
    hook = CheckpointHook(CheckpointPolicy(every=None), console(), on_alarm=True)
    job = FakeJob(tmp_path, [*alarms, hook], last_step=9)
    job.layers, job.save = [layer(0, ONE_SIDED)], save  # type: ignore[method-assign]
    job.go()
    assert saved == [3, 4]


def test_a_refused_save_is_said_whatever_the_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets in a path are no markup, and do not end the run."""

    def save() -> Path:
        raise SaveError(tmp_path / "a[/b]", "disk full", needed=2, free=1)

    where = console()
    job = FakeJob(tmp_path, [CheckpointHook(CheckpointPolicy(every=2), where)], last_step=4)
    monkeypatch.setattr(job, "save", save)
    job.go()
    assert "a[/b]" in said(where)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="an optional package")
@pytest.mark.parametrize("begun", [0, 4])
def test_events_of_steps_that_are_made_again_are_hidden(
    tmp_path: Path, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that goes on without a checkpoint, and of one that went back by itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer as writer

    # Files of one second are read by their numbers as text: all have two digits.
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(10))

    def steps() -> list[int]:
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        return [event.step for event in found.Scalars("lm_loss")]

    FakeJob(tmp_path, [TensorBoardHook()]).go(steps=7)
    job: Any = FakeJob(tmp_path, [hook := TensorBoardHook()])
    job.step_number = begun
    hook.on_start(job)
    for step in (begun + 1, begun + 2):
        job.step_number = step
        hook.on_step(job, {"lm_loss": float(step)})
    job.step_number = begun + 1
    hook.on_rewind(job)
    hook.on_stop(job, None)
    assert steps() == list(range(1, begun + 2))
