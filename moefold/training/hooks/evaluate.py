"""Evaluation on the held-out sets, every so many steps and at the end."""

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Evaluate


class EvaluateHook(Hook):
    """Adds ``val_loss`` and ``val/<set>/…`` to the step's figures."""

    def __init__(self, record: Evaluate) -> None:
        self._every = record.every

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Evaluate where the step is due."""
        if job.step_number % self._every == 0 or job.step_number == job.last_step:
            metrics.update(job.evaluate())
