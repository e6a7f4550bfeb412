"""Checkpoints, every so many steps."""

from moefold.training.hooks.base import Figures, Hook, JobView


class CheckpointHook(Hook):
    """Saves where the step is due; the last step of a process is saved by the loop itself.

    It stands last among the hooks, so that everything written about a step is written before the
    checkpoint that a resumed run starts from.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save where the step is due."""
        if self._every and job.step_number % self._every == 0 and job.step_number < job.last_step:
            job.save()
