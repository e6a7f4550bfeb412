"""The figures of each step in ``metrics.jsonl``, and the sinks that were asked for besides."""

from importlib.util import find_spec

from moefold.config.slot import build
from moefold.training.history import METRICS_FILE
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Metrics
from moefold.training.hooks.lines import StepLines
from moefold.training.hooks.tensorboard import TensorBoardHook


class MetricsHook(Hook):
    """Writes ``metrics.jsonl``: one object per step, each step once, also after resuming."""

    def __init__(self) -> None:
        self._lines = StepLines(METRICS_FILE)

    def on_start(self, job: JobView) -> None:
        """Drop the lines of steps after the checkpoint that the run continues from."""
        self._lines.open(job.folder, job.step_number)

    def on_rewind(self, job: JobView) -> None:
        """Drop the lines of the steps that are made again."""
        self._lines.rewind(job.step_number)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write the line of this step."""
        self._lines.append(job.step_number, {k: v for k, v in metrics.items() if k != "step"})

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Make the file durable."""
        self._lines.close()


def sinks(record: Metrics) -> list[Hook]:
    """Return the hooks that write what ``record`` asks for, the file first.

    An asked-for sink whose package is missing raises a ValueError that says how to get it.
    """
    hooks: list[Hook] = [MetricsHook()]
    wanted = record.tensorboard
    if wanted == "on" or (wanted == "auto" and find_spec("tensorboard") is not None):
        hooks.append(TensorBoardHook())
    if record.wandb is not None:
        hooks.append(build(record.wandb))
    return hooks
