"""Steps that a norm above ``train.skip_norm`` leaves out."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moefold.training.hooks.config import ProgressDisplay
from moefold.training.hooks.progress import ProgressHook
from moefold.training.nonfinite import LargeGradients
from moefold.training.state import iter_state
from moefold.training.trainer import Trainer
from tests.cpu.runs import Notes, job_of
from tests.cpu.test_training_loop import DEEPSEEK, Poison

LARGE = 1e4
CHANGES: dict[str, Any] = {
    "model": DEEPSEEK,
    "optim": {"kind": "adamw", "lr": 0.01, "schedule_lr": {"kind": "linear", "warmup": 2}},
    "train": {"skip_norm": {"above": 100.0, "limit": 2}},
}
"""A selection bias, and a rate that is another at each step."""


def everything(job: Trainer) -> dict[str, Any]:
    """Return weights, biases, moments and step counts."""
    return {n: part.tensor.detach().clone() for n, part in iter_state(job.state, job.optimizer)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[n].equal(other[n]) for n in one)


def test_a_run_that_skips_a_batch_is_the_run_without_it(tmp_path: Path) -> None:
    """Also where it is resumed right after the skipped step; its tokens are counted."""
    notes = Notes()
    with job_of(tmp_path, "skips", notes, **CHANGES) as job:
        Poison(job, {1}, LARGE)
        job.step()
        before = everything(job)
        figures = job.step()
        assert 100.0 < figures["grad_norm"] < math.inf
        assert same(everything(job), before)
        assert any(".step" in name and int(t) == 1 for name, t in before.items())
        assert any("bias" in name and t.any() for name, t in before.items())
        job.save()
    with job_of(tmp_path, "skips", notes, **CHANGES) as job:
        assert (job.progress.step, job.progress.skipped, job.progress.strikes) == (2, 1, 1)
        job.step()
        job.step()
        skipping = everything(job)
        assert job.progress.strikes == 0
    with job_of(tmp_path, "without", plain := Notes(), **CHANGES) as job:
        job.progress.excluded = (1,)
        for _ in range(3):
            job.step()
        assert same(everything(job), skipping)
    rates = [figures["lr"] for figures in notes.steps]
    assert rates == [plain.steps[n]["lr"] for n in (0, 1, 1, 2)] and len(set(rates)) == 3
    assert [figures.get("skipped_steps") for figures in notes.steps] == [None, 1, None, None]
    tokens = [figures["tokens"] for figures in notes.steps]
    assert tokens == sorted(set(tokens))


def test_a_limit_of_steps_in_a_row_ends_the_run(tmp_path: Path) -> None:
    with job_of(tmp_path, **CHANGES) as job:
        Poison(job, {0, 2, 3, 4}, LARGE)
        job.step()
        job.step()
        before = everything(job)
        job.step()
        job.step()
        match = r"step 5 .*above train\.skip_norm\.above \(100\).*the 2 steps before it"
        with pytest.raises(LargeGradients, match=match):
            job.step()
        assert same(everything(job), before)
        assert (job.progress.step, job.progress.skipped) == (4, 3)


def test_the_console_says_why_and_how_many(tmp_path: Path) -> None:
    text = io.StringIO()
    hook = ProgressHook(ProgressDisplay(style="lines", seconds=60.0), Console(file=text, width=200))
    with job_of(tmp_path, "out", hook, **CHANGES) as job:
        Poison(job, {0}, LARGE)
        job.step()
    said = text.getvalue()
    assert "skipped step 1: its gradient norm of " in said
    assert "is above train.skip_norm.above (100); nothing was updated (1 skipped so far)" in said
