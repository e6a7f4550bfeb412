"""Hooks' counts are part of a checkpoint: an interrupted run tells what a whole one does."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.training.hooks.alarms import HealthHook, PaceHook, SpikesHook
from moefold.training.hooks.base import Figures, Hook, HookState, hook_states, load_hook_states
from moefold.training.hooks.config import Health, Pace, Spikes
from moefold.training.hooks.logs import MetricsHook
from moefold.training.run_folder import EVENTS_FILE, METRICS_FILE
from moefold.training.trainer import Trainer
from tests.cpu.runs import job_of
from tests.pure.fake_job import FakeJob

STEPS = 14
TIMED = ("tokens_per_s", "step_time_s", "mfu", "mfu_peak", "utilisation")
QUIET = Console(quiet=True)


class Counter(Hook):
    """A hook from outside that counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> HookState:
        return {"count": self.count}

    def load_state(self, state: HookState) -> None:
        self.count = state.get("count", 0)

    def on_step(self, job: Any, metrics: Figures) -> None:
        self.count += 1
        metrics["counted"] = self.count


def open_job(folder: Path, out: str) -> Trainer:
    """Open a run whose layers fail every check, and whose norms are spikes now and then."""
    hooks = [
        HealthHook(Health(every=2, patience=3, load_ratio=1.0001), QUIET),
        SpikesHook(Spikes(ratio=1.001, of=8), QUIET),
        Counter(),
        MetricsHook(),
    ]
    return job_of(folder, out, *hooks, train={"steps": STEPS})


def told(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the figures of each step and the events, without times; checks of all steps only."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    kept = [
        {k: v for k, v in line.items() if k not in TIMED and not k.startswith("moe/0")}
        for line in lines
    ]
    kept = [{k: v for k, v in line.items() if not k.startswith("moe/1")} for line in kept]
    for line in kept:
        if not line.get("moe/alarms"):
            line.pop("moe/alarms", None)
    events = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    spikes = [event for event in events if event["event"] == "spike"]
    return kept, [{k: e[k] for k in ("step", "grad_norm", "usual")} for e in spikes]


def test_a_run_stopped_at_every_step_tells_what_a_whole_one_does(tmp_path: Path) -> None:
    with open_job(tmp_path, "whole") as job:
        job.train()
    for step in range(1, STEPS + 1):
        with open_job(tmp_path, "broken") as job:
            assert job.step_number == step - 1
            job.last_step = step
            job.train()
    whole, broken = told(tmp_path / "whole"), told(tmp_path / "broken")
    assert broken == whole
    assert [line["step"] for line in whole[0] if line.get("moe/alarms")] == [6]
    assert whole[1] and [line["counted"] for line in whole[0]] == list(range(1, STEPS + 1))
    path = find_newest(tmp_path / "broken")
    assert path is not None
    stored = manifest.read(path).meta["hooks"]
    assert stored["Counter"] == {"count": STEPS}
    assert stored["HealthHook"] == {"failed": {"0": 7, "1": 7}}
    assert len(stored["SpikesHook"]["norms"]) == 8


def test_steps_lost_to_a_kill_are_counted_once(tmp_path: Path) -> None:
    """The process ends three steps after its checkpoint, without a word."""
    with open_job(tmp_path, "whole") as job:
        job.train()
    job = open_job(tmp_path, "killed")
    for _ in range(5):
        job.step()
    job.save()
    for _ in range(3):
        job.step()
    job.close(KeyboardInterrupt())
    with open_job(tmp_path, "killed") as job:
        assert job.step_number == 5
        job.train()
    assert told(tmp_path / "killed") == told(tmp_path / "whole")


class SlowRank(FakeJob):
    """A job of three ranks, of which one is slow."""

    class world:
        size = 3

    def pace(self) -> list[float]:
        return [1.0, 1.0, 9.0]


@pytest.mark.parametrize("stop", range(1, 9))
def test_slow_checks_in_a_row_are_counted_over_a_resume(tmp_path: Path, stop: int) -> None:
    console = Console(file=io.StringIO(), record=True, width=200)
    states: dict[int, str] = {}
    for start, steps in ((0, stop), (stop, 10 - stop)):
        hook = PaceHook(Pace(every=2, patience=3, ratio=2.0), console)
        SlowRank(tmp_path, [hook], states=states).go(steps, start)
    assert console.export_text().count("slow rank step 6: rank 2") == 1


def test_hooks_of_one_class_have_states_of_their_own() -> None:
    hooks = [Counter(), Hook(), Counter()]
    hooks[0].count, hooks[2].count = 3, 5  # type: ignore[attr-defined]
    states = json.loads(json.dumps(hook_states(hooks)))
    assert states == {"Counter": {"count": 3}, "Counter#2": {"count": 5}}
    fresh = [Counter(), Counter(), Counter()]
    load_hook_states(fresh, states | {"Gone": {"count": 1}, "Counter#3": "no mapping"})
    assert [hook.count for hook in fresh] == [3, 5, 0]


def test_older_checkpoints_have_their_norms_in_the_file(tmp_path: Path) -> None:
    lines = (json.dumps({"step": n, "grad_norm": 1.0 + n}) for n in range(1, 21))
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    hook = SpikesHook(Spikes(of=8), QUIET)
    job = FakeJob(tmp_path, [hook])
    job.go(steps=0, start=10)
    assert hook.state() == {"norms": [float(n) for n in range(4, 12)]}
