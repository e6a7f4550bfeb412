"""Checkpoints, every so many steps."""

import time

from rich.console import Console

from moefold.checkpoint.config import Policy
from moefold.checkpoint.errors import SaveError
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.events import note


class CheckpointHook(Hook):
    """Saves where the step is due; the last step of a process is saved by the loop itself.

    It stands last among the hooks, so that everything written about a step is written before the
    checkpoint that a resumed run starts from. A save that the storage refuses is tried again at
    the next step, or ends the run, as the policy says.
    """

    def __init__(self, policy: Policy, console: Console) -> None:
        self._policy = policy
        self._console = console
        self._owed = False

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save where the step is due, or where an earlier save still is."""
        every = self._policy.every
        due = bool(every) and job.step_number % (every or 1) == 0
        if not (due or self._owed) or job.step_number >= job.last_step:
            return
        try:
            began = time.monotonic()
            job.save()
            self._owed = False
            stall_s = time.monotonic() - began
            note(job.folder, "saved", step=job.step_number, stall_s=stall_s)
        except SaveError as error:
            if self._policy.on_failure == "stop":
                raise
            self._owed = True
            self._console.print(
                f"[bold red]checkpoint failed[/] step {job.step_number}: {error}\n"
                "training goes on; the next step tries again",
                soft_wrap=True,
                highlight=False,
            )
