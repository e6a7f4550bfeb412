"""The hooks of a run: which, and in which order."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest

from moefold.config.base import Record
from moefold.training.hooks.assemble import assemble
from moefold.training.hooks.base import Hook
from moefold.training.hooks.config import (
    Evaluate,
    Metrics,
    Profile,
    ProgressDisplay,
    Sample,
    Wandb,
    Watch,
)
from tests.pure.fake_job import FakeJob

EVERYTHING = Watch(
    evaluate=Evaluate(baselines=("xz",)),
    sample=Sample(prompts=("a",)),
    profile=Profile(steps=(3,)),
    metrics=Metrics(tensorboard="off"),
)


class Outside(Hook):
    """A hook that is not ours."""

    def __init__(self, record: Record | None = None) -> None:
        self.record = record


class OutsideRecord(Record):
    """Its record."""

    kind: Literal["outside"] = "outside"

    owner = Outside


def names(watch: Watch, outside: tuple[Hook, ...] = ()) -> list[str]:
    """Return the classes of the hooks."""
    return [type(hook).__name__ for hook in assemble(watch, extra=outside)]


def test_everything_stands_in_its_order() -> None:
    """Figures first, sinks after them, what saves last."""
    assert names(EVERYTHING, (Outside(),)) == [
        "ProfileHook", "BaselinesHook", "EvaluateHook", "HealthHook", "PaceHook", "SpikesHook",
        "SampleHook", "Outside", "EventsHook", "MetricsHook", "ProgressHook", "PlotsHook",
        "ExpertsPageHook", "AlarmHook", "DataFilesHook", "CheckpointHook", "ProfileStart",
    ]  # fmt: skip


def test_what_is_turned_off_is_not_there() -> None:
    """The file of metrics, events and checkpoints stay."""
    watch = Watch(
        evaluate=None, health=None, pace=None, spikes=None, plots=None, experts_page=None,
        progress=ProgressDisplay(style="off"), metrics=Metrics(tensorboard="off"),
    )  # fmt: skip
    assert names(watch) == [
        "EventsHook",
        "MetricsHook",
        "ProgressHook",
        "DataFilesHook",
        "CheckpointHook",
    ]


def test_hooks_of_the_run_file_stand_before_those_of_a_program() -> None:
    """Both between the figures and the sinks; the record is the hook's."""
    hooks = assemble(EVERYTHING.model_copy(update={"hooks": (OutsideRecord(),)}), extra=(Hook(),))
    place = next(i for i, hook in enumerate(hooks) if isinstance(hook, Outside))
    assert isinstance(hooks[place].record, OutsideRecord)  # type: ignore[attr-defined]
    assert type(hooks[place + 1]) is Hook


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the package is there")
def test_a_missing_sink_that_was_asked_for_says_how_to_get_it() -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match=r"pip install 'moefold\[wandb\]'"):
        assemble(Watch(metrics=Metrics(tensorboard="off", wandb=Wandb())))


def test_tensorboard_is_optional_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` does without, ``on`` does not."""
    for module in ("assemble", "logs"):
        monkeypatch.setattr(f"moefold.training.hooks.{module}.find_spec", lambda name: None)
    assert "TensorBoardHook" not in names(Watch())
    with pytest.raises(ValueError, match=r"pip install 'moefold\[tensorboard\]'"):
        assemble(Watch(metrics=Metrics(tensorboard="on")))


def test_a_continued_run_goes_on_at_the_service(tmp_path: Any, monkeypatch: Any) -> None:
    """The same id the second time; every step's figures; the end told. It is a stand-in."""
    calls: list[tuple[str, Any]] = []

    class Run(SimpleNamespace):
        def log(self, figures: dict, step: int) -> None:
            calls.append(("log", (step, figures["lm_loss"])))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    service = ModuleType("wandb")
    service.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]

    def init(**given: Any) -> Run:
        calls.append(("init", (given["project"], given["id"], given["config"]["name"])))
        return Run(id=given["id"] or "abc")

    service.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", service)
    for start in (0, 2):
        hooks = assemble(Watch(metrics=Metrics(tensorboard="off", wandb=Wandb(project="p"))))
        chosen = [hook for hook in hooks if type(hook).__name__ == "WandbHook"]
        FakeJob(tmp_path, chosen, last_step=4).go(steps=2, start=start)
    assert calls == [
        ("init", ("p", None, "trial")), ("log", (1, 3.0)), ("log", (2, 1.5)), ("finish", 0),
        ("init", ("p", "abc", "trial")), ("log", (3, 1.0)), ("log", (4, 0.75)), ("finish", 0),
    ]  # fmt: skip


def test_a_service_that_cannot_be_reached_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package raises errors of its own, which are no ValueError."""
    service = ModuleType("wandb")
    service.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]
    service.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]

    def init(**given: Any) -> None:
        raise service.Error("Run initialization has timed out after 90.0 sec.")

    service.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", service)
    hooks = assemble(Watch(metrics=Metrics(tensorboard="off", wandb=Wandb(project="p"))))
    chosen = [hook for hook in hooks if type(hook).__name__ == "WandbHook"]
    with pytest.raises(ValueError, match=r"after 90.*watch\.metrics\.wandb\.mode=offline"):
        FakeJob(tmp_path, chosen, last_step=4).go(steps=2)
