"""Checks that the files of a run's tokens are those that it began with."""

from moefold.data.config import DataError
from moefold.training.hooks.base import Figures, Hook, JobView


class DataFilesHook(Hook):
    """Looks at size, time and inode of token files whenever a checkpoint is due.

    Bytes are compared with their digests as they are read (``data/blocks.py``). This notices that a
    later read, or a later start, would fail.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save and stop if a file changed."""
        due = self._every is not None and job.step_number % self._every == 0
        if not due and job.step_number < job.last_step:
            return
        changes = job.loader.prepared.changes()
        if changes:
            path = job.save()
            raise DataError(
                f"{'; '.join(changes)}. All tokens trained so far were compared with their "
                f"digests; saved {path}. Restore the file, then resume"
            )
