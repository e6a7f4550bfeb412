"""Whatever a run keeps between two steps is in its checkpoint, known to anyone or not.

A run takes steps, saves, and is opened anew. All that can be reached from model, optimizer and
progress, in any attribute, must then be what it was, unless it starts anew with each step.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import Enum
from errno import EROFS
from math import nan
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.checkpoint.disk import Disk
from moefold.config.base import Record
from moefold.data.order import Given, OrderStart
from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.rates import RatePhase
from moefold.training import trainer
from moefold.training.nonfinite import NonFiniteStep
from moefold.training.state import Progress
from moefold.training.step import StepFigures
from moefold.training.trainer import Trainer
from tests.cpu.checkpoint_tools import bits
from tests.cpu.runs import Notes, job_of

ANEW = re.compile(r"\.counters\b|\.precision_policy\.(seed|step)$")
"""Counts of a step, which begin at zero in the next, and what draws by chance go by."""
PROGRESS = Progress(
    3,
    77,
    (1,),
    2,
    1,
    sequence_offset=9,
    order=OrderStart(2, (Given("left out", "its digest", 1, ((16, 3), (8, 1)), epoch=1),)),
    rate=(RatePhase(6), RatePhase(8, "constant", 6, 0.5)),
    skipped=1,
)
BIASED = {
    "family": "deepseek_v3",
    "shape": {"hidden": 16, "layers": 2, "heads": 2, "experts": 4, "top_k": 2, "expert_width": 6}
    | {"dense_layers": 1, "q_rank": 5, "kv_rank": 7, "nope_dim": 4, "rope_dim": 4, "v_dim": 3}
    | {"shared_width": 12},
    "groups": {"count": 2, "keep": 1},
    "balance": [{"kind": "bias", "rate": 0.01}],
}


def reach(thing: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """Note every tensor and every plain value that can be reached, by its path."""
    if isinstance(thing, Tensor):
        found[path] = thing.detach().clone()
    elif isinstance(thing, bool | int | float | str | Enum):
        found[path] = thing
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            reach(value, f"{path}.{key}", found, seen)
    elif isinstance(thing, list | tuple):
        for number, value in enumerate(thing):
            reach(value, f"{path}.{number}", found, seen)
    elif not isinstance(thing, Record | type) and id(thing) not in seen:
        seen.add(id(thing))
        ours = type(thing).__module__.partition(".")[0] in ("moefold", "tests")
        if ours or isinstance(thing, nn.Module):
            for key, value in getattr(thing, "__dict__", {}).items():
                reach(value, f"{path}.{key}", found, seen)


def kept(job: Trainer) -> dict[str, Any]:
    """Return all that a job keeps between two steps."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in ("model", "optimizer", "progress"):
        reach(getattr(job, name), name, found, seen)
    return {path: value for path, value in found.items() if not ANEW.search(path)}


def forgotten(folder: Path, **changes: Any) -> list[str]:
    """Return the paths of what a run knew when it saved and its successor does not."""
    with job_of(folder, **changes) as job:
        fresh = kept(job)
        for _ in range(3):
            job.step()
        # Beyond what three steps change: everything that is known differs from a fresh start.
        with torch.no_grad():
            for tensor in job.model.state_dict().values():
                tensor.add_(torch.rand_like(tensor.float()).to(tensor.dtype))
        job.progress = replace(PROGRESS)
        job.save()
        before = kept(job)
    assert sum(differ(before[path], fresh.get(path)) for path in before) > 20
    with job_of(folder, **changes) as again:
        assert again.resumed_from is not None
        after = kept(again)
    return sorted(path for path in {*before, *after} if differ(before.get(path), after.get(path)))


def differ(one: Any, other: Any) -> bool:
    """Return whether two values differ in a bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or one.dtype != other.dtype or bits(one) != bits(other)
    return type(one) is not type(other) or one != other


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("model", [{}, BIASED])
def test_all_that_is_kept_between_steps_is_saved(
    tmp_path: Path, kind: str, model: dict[str, Any]
) -> None:
    optim = {"kind": kind, "lr": 0.01, "schedule_lr": {"kind": "wsd", "warmup": 2}}
    assert forgotten(tmp_path, model=model, optim=optim) == []


def test_every_field_of_progress_is_saved() -> None:
    """A new field must be given a value of its own above."""
    defaults = Progress()
    assert all(
        getattr(PROGRESS, each.name) != getattr(defaults, each.name) for each in fields(Progress)
    )


def test_steps_that_are_not_finite_are_counted_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarts must not let a run skip steps without end."""
    real, train = trainer.gradients, {"on_nonfinite": {"kind": "skip", "limit": 3}}

    def spoilt(*given: Any, **how: Any) -> StepFigures:
        return replace(real(*given, **how), grad_norm=nan)

    monkeypatch.setattr(trainer, "gradients", spoilt)
    for _ in range(3):
        with job_of(tmp_path, train=train) as job:
            job.step()
            job.save()
    with job_of(tmp_path, train=train) as job, pytest.raises(NonFiniteStep, match="limit of 3"):
        job.step()


def test_what_a_rewind_left_out_is_saved_where_the_run_is_stopped_at_once(tmp_path: Path) -> None:
    class Stops(Notes):
        def on_rewind(self, job: Any) -> None:
            job.request_stop("enough")

    train = {"on_nonfinite": {"kind": "rewind"}}
    with job_of(tmp_path, "out", Stops(), train=train) as job:
        job.step()
        job.save()
        assert job.model.norm is not None
        job.model.norm.register_forward_hook(lambda *given: given[-1] * nan)
        with pytest.raises(trainer.Interrupted):
            job.train()
    with job_of(tmp_path, train=train) as job:
        assert job.progress.excluded == (1,) and job.progress.strikes == 1


def test_a_rewind_lets_a_failure_behind_the_steps_pass_as_a_step_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        sleep(0.5)  # so that the step begins before
        raise OSError(EROFS, "Read-only file system")

    watch = {"checkpoint": {"every": None, "asynchronous": True}}
    with job_of(tmp_path, train={"on_nonfinite": {"kind": "rewind"}}, watch=watch) as job:
        job.step()
        job.save()
        job.step()
        job.saver.wait()
        monkeypatch.setattr(Disk, "write", refuse)
        job.save()
        assert job.model.norm is not None
        job.model.norm.register_forward_hook(lambda *given: given[-1] * nan)
        job.step()
        assert (job.step_number, job.progress.excluded) == (1, (2,))


def test_state_that_is_not_registered_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: an optimizer with a tensor and a number of which its state says nothing."""
    step, start = AdamWOptimizer.step, AdamWOptimizer.__init__

    def knows(self: Any, *given: Any, **more: Any) -> None:
        start(self, *given, **more)
        self.average, self.calls = {"norm": torch.zeros(1)}, 0

    def learns(self: Any, *given: Any) -> None:
        step(self, *given)
        self.average["norm"] += 1
        self.calls += 1

    monkeypatch.setattr(AdamWOptimizer, "__init__", knows)
    monkeypatch.setattr(AdamWOptimizer, "step", learns)
    assert forgotten(tmp_path) == ["optimizer.average.norm", "optimizer.calls"]


def test_a_buffer_that_is_not_persistent_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a module that learns in a buffer which its state dict leaves out."""
    step = Trainer.step
    with job_of(tmp_path, "first"):
        pass

    def learns(self: Trainer, *given: Any) -> Any:
        for layer in self.model.layers.values():
            layer.running = getattr(layer, "running", torch.zeros(2)) + 1
        return step(self, *given)

    monkeypatch.setattr(Trainer, "step", learns)
    assert forgotten(tmp_path) == ["model._modules.layers._modules.0.running",
                                   "model._modules.layers._modules.1.running"]  # fmt: skip
