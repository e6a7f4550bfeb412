"""Checkpoints, every so many steps."""

import time

from rich.console import Console
from rich.markup import escape

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import SaveError
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.run_folder import note


class CheckpointHook(Hook):
    """Saves where the step is due; the last step of a process is saved by the loop itself.

    It stands last among the hooks, so that everything written about a step is written before the
    checkpoint that a resumed run starts from. A save that the storage refuses ends the run as
    the policy says, or is tried again after one step, two more, four more, and where one is due.
    """

    def __init__(self, policy: CheckpointPolicy, console: Console) -> None:
        self._policy = policy
        self._console = console
        self._owed: int | None = None
        self._wait = 1

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save where the step is due, or where an earlier save still is."""
        step, every = job.step_number, self._policy.every
        if every is None or step >= job.last_step:
            return
        if step % every and (self._owed is None or step < self._owed):
            return
        try:
            began = time.monotonic()
            job.save()
            self._owed, self._wait = None, 1
            stall_s = time.monotonic() - began
            note(job.folder, "saved", step=step, stall_s=stall_s)
        except SaveError as error:
            if self._policy.on_failure == "stop":
                raise
            due = step - step % every + every
            self._owed, self._wait = min(step + self._wait, due), 2 * self._wait
            self._console.print(
                f"[bold red]checkpoint failed[/] step {step}: {escape(str(error))}\n"
                f"training goes on; step {self._owed} tries again",
                soft_wrap=True,
                highlight=False,
            )
