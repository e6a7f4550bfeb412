"""What a report says of faults: recoveries, steps made again, seconds, how often to save."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from moefold.training.hooks.alarms import PaceHook, SpikesHook
from moefold.training.hooks.config import Pace, Spikes
from moefold.training.hooks.logs import MetricsHook
from moefold.training.report import downtime, summary
from moefold.training.run_folder import History
from tests.pure.fake_job import FakeJob


def start(time: float, step: int, **recovered: Any) -> dict[str, Any]:
    event = {"event": "start", "time": time, "step": step}
    return event | ({"recovered": recovered} if recovered else {})


LIVED = start(
    50.0, 19, restart_s=2.0, load_s=0.5, reached=20, under_way_s=0.25, lost=[1], why="", noticed=0.0
)
FROM_DISK = start(80.0, 10, restart_s=4.0, load_s=1.5, reached=30, under_way_s=0.25)
SAVED = [{"event": "saved", "time": 60.0, "step": 5, "stall_s": stall} for stall in (0.1, 0.2, 5.0)]


def history(*events: dict[str, Any]) -> History:
    lines = [{"step": step, "step_time_s": 1.0, "lm_loss": 1.0} for step in range(1, 61)]
    return History(lines, events=list(events))


def test_parts_add_up() -> None:
    events = [start(0.0, 0), LIVED, FROM_DISK, start(90.0, 30), *SAVED]
    found = downtime(history(*events), 100.0)
    assert found["restarts"] == 1 and found["recoveries"] == 2
    assert found["lost_steps"] == 1 + 20
    assert found["lost_s"] == {"restart_s": 6.0, "load_s": 2.0, "lost_s": 0.5 + 1 + 20}
    assert found["save_every_s"] == pytest.approx(math.sqrt(2 * 0.2 * 100 / 3))


def test_nothing_lost_nothing_said() -> None:
    found = downtime(history(start(0.0, 0)), 60.0)
    assert found["recoveries"] == found["restarts"] == found["lost_steps"] == 0
    assert "save_every_s" not in found


def test_the_summary_has_them() -> None:
    found = summary(history(start(0.0, 0), LIVED, {"event": "stop", "time": 100.0}))
    assert found["goodput"] == pytest.approx(0.6)
    assert found["recoveries"] == 1


class Part:
    """A micro-batch whose documents are numbered by its place."""

    def __init__(self, place: int, j: int) -> None:
        self.sources = [SimpleNamespace(name="text", document=10 * place + j)]


def watched(folder: Any, micro_batches: int) -> tuple[SpikesHook, FakeJob]:
    """Return the hook, and a run at place 7 of the data's order."""
    hook = SpikesHook(Spikes(ratio=4, of=8), Console(width=200))
    job = FakeJob(folder, [hook])
    loader: Any = SimpleNamespace(n_micro_batches=lambda step: micro_batches, load_micro_batch=Part)
    vars(job).update(loader=loader, batch_index=7)
    return hook, job


def test_a_spike_is_noted_with_its_documents(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, job = watched(tmp_path, 2)
    for step, norm in enumerate([5.0, *[1.0] * 7, 4.0, 4.1, 1.0], 1):
        job.step_number = step
        hook.on_step(job, {"grad_norm": norm})
    (spike,) = History.read(tmp_path).events
    assert (spike["step"], spike["place"], spike["usual"]) == (10, 7, 1.0)
    assert spike["documents"] == ["text 70", "text 71"]
    assert capsys.readouterr().out.count("spike") == 1


def test_a_norm_that_is_not_finite_says_nothing_of_what_is_usual(tmp_path: Any) -> None:
    hook, job = watched(tmp_path, 1)
    for step, norm in enumerate([1.0] * 3 + [math.nan] + [1.0] * 10 + [9.0], 1):
        job.step_number = step
        hook.on_step(job, {"grad_norm": norm})
    (spike,) = History.read(tmp_path).events
    assert (spike["step"], spike["usual"]) == (15, 1.0)


@pytest.mark.parametrize("at", [8, 10, 12])
def test_a_run_that_goes_on_knows_which_norm_is_usual(tmp_path: Any, at: int) -> None:
    """As one that nothing interrupted: a spike and steps that are made again count for nothing."""
    norms = [1.0] * 8 + [9.0, 1.5, math.nan, 70.0, 3.9, 6.1]

    def goes(folder: Any, *parts: range) -> list[tuple[int, float]]:
        folder.mkdir()
        for steps in parts:
            hook, job = watched(folder, 1)
            job.hooks, job.step_number = [hook, MetricsHook()], steps.start
            for told in job.hooks:
                told.on_start(job)
            for job.step_number in range(steps.start + 1, steps.stop + 1):
                for told in job.hooks:
                    told.on_step(job, {"grad_norm": norms[job.step_number - 1]})
            job.end()
        spikes = {e["step"]: e["usual"] for e in History.read(folder).events if e["usual"]}
        return sorted(spikes.items())

    whole = goes(tmp_path / "whole", range(len(norms)))
    assert [step for step, _ in whole] == [9, 11, 12, 14]
    assert goes(tmp_path / "broken", range(min(at + 2, 14)), range(at, len(norms))) == whole


def test_a_slow_rank_is_named_after_some_looks_in_a_row(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = PaceHook(Pace(every=1, patience=3), Console(width=200))
    job = FakeJob(tmp_path, [hook], last_step=6)
    job.world = type("World", (), {"size": 4})()
    looks = iter(
        [[1, 1, 9, 1], [1, 1, 1, 1], [1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 2, 1], [2, 1, 2, 1]]
    )
    job.pace = lambda: [float(seconds) for seconds in next(looks)]  # type: ignore[attr-defined]
    seen = job.go()
    said = capsys.readouterr().out
    assert said.count("slow rank") == 1 and "step 5: rank 2 was busy for 2.00 s" in said
    assert seen[0]["pace/slowest_over_median"] == 9 and seen[0]["pace/slowest_rank"] == 2
