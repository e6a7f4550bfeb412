"""Evaluation on the held-out sets, and the baselines for its result."""

import json
from collections.abc import Sequence

from rich.console import Console

from moefold.data.baselines import compute_baselines
from moefold.files import write_text
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Evaluate
from moefold.training.run_folder import BASELINES_FILE, read_baselines


class EvaluateHook(Hook):
    """Adds ``val_loss`` and ``val/<set>/…`` to the step's metrics, every ``every`` steps."""

    def __init__(self, record: Evaluate) -> None:
        self._every = record.every

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Evaluate if the step is due, and at the end."""
        if job.step_number % self._every == 0 or job.step_number == job.last_step:
            metrics.update(job.evaluate())


class StartEvaluationHook(Hook):
    """Evaluates before the first step of a run, and logs the result as step 0."""

    def __init__(self, loggers: Sequence[Hook]) -> None:
        self._logs = loggers

    def on_start(self, job: JobView) -> None:
        """Evaluate if no step was trained yet."""
        if job.step_number == 0:
            metrics = job.evaluate()
            for logger in self._logs:
                logger.on_step(job, metrics)


class BaselinesHook(Hook):
    """Measures the baselines before the first step; a resumed run reads them from its folder."""

    def __init__(self, record: Evaluate, console: Console) -> None:
        self._wanted = record.baselines
        self._console = console

    def on_start(self, job: JobView) -> None:
        """Measure bits per byte on the held-out text, write ``baselines.json``, print them."""
        path = job.folder / BASELINES_FILE
        baselines = read_baselines(path)
        if set(baselines) != set(self._wanted):
            measured = compute_baselines(job.loader.prepared)
            baselines = {name: measured[name] for name in self._wanted}
            write_text(path, json.dumps(baselines) + "\n")
        values = "  ".join(f"{name} {value:.3f}" for name, value in baselines.items())
        self._console.print(f"[cyan]baselines[/] {values} bits per byte", highlight=False)
