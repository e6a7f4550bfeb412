"""The hooks of a run, in the order in which they are called.

1. ``profile`` ends a trace, so that it contains no other hook
2. baselines are measured; ``evaluate``, ``health``, ``pace`` and ``spikes`` add to the step's
   metrics or warn; ``sample`` writes text
3. hooks from outside the package, which may read and extend the metrics so far
4. ``metrics.jsonl``, TensorBoard and W&B write the metrics
5. ``progress`` shows them; an evaluation before the first step is sent to the loggers of 4;
   ``plots`` and the experts page draw from the files
6. the alarm, a check of the files of data, and checkpoints: everything about a step is written
   before its checkpoint, so that a run that resumes there has lost nothing
7. ``profile`` starts the trace of the next step
"""

from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console

from moefold.config.slot import build
from moefold.training.hooks.alarms import AlarmHook
from moefold.training.hooks.base import Hook
from moefold.training.hooks.checkpoint import CheckpointHook
from moefold.training.hooks.config import Watch
from moefold.training.hooks.data import DataFilesHook
from moefold.training.hooks.evaluate import BaselinesHook, StartEvaluationHook
from moefold.training.hooks.logs import EventsHook, MetricsHook, TensorBoardHook
from moefold.training.hooks.profile import ProfileHook, ProfileStart


def assemble(
    watch: Watch, console: Console | None = None, extra: Sequence[Hook] = ()
) -> tuple[Hook, ...]:
    """Build the hooks that ``watch`` configures, and insert those of ``extra``.

    Raises:
        ValueError: if a logger's package is missing; says how to install it.
    """
    console = console or Console()
    profile = None if watch.profile is None else ProfileHook(watch.profile)
    hooks: list[Hook] = [] if profile is None else [profile]
    if watch.evaluate is not None:
        if watch.evaluate.baselines:
            hooks.append(BaselinesHook(watch.evaluate, console))
        hooks.append(build(watch.evaluate))
    checks = (watch.health, watch.pace, watch.spikes, watch.sample)
    hooks += [build(record, console) for record in checks if record]
    hooks += [*(build(record) for record in watch.hooks), *extra]
    loggers: list[Hook] = [MetricsHook()]
    tensorboard = watch.metrics.tensorboard
    if tensorboard == "on" or (tensorboard == "auto" and find_spec("tensorboard") is not None):
        loggers.append(TensorBoardHook())
    if watch.metrics.wandb is not None:
        loggers.append(build(watch.metrics.wandb))
    hooks += [EventsHook(), *loggers, build(watch.progress, console)]
    if watch.evaluate is not None and watch.evaluate.at_start:
        hooks.append(StartEvaluationHook(loggers))
    hooks += [build(record) for record in (watch.plots, watch.experts_page) if record]
    if watch.health is not None:
        hooks.append(AlarmHook(watch.health))
    hooks.append(DataFilesHook(watch.checkpoint.every))
    on_alarm = watch.health is not None and watch.health.action == "checkpoint"
    hooks.append(CheckpointHook(watch.checkpoint, console, on_alarm))
    return (*hooks, *(() if profile is None else (ProfileStart(profile),)))
