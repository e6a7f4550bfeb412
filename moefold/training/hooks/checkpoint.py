"""Checkpoints at regular steps."""

import time

from rich.console import Console
from rich.markup import escape

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import SaveError
from moefold.training.hooks.alarms import ALARMS_KEY
from moefold.training.hooks.base import Figures, Hook, HookState, JobView
from moefold.training.run_folder import log_event


class CheckpointHook(Hook):
    """Saves a checkpoint if the step is due or, with ``on_alarm``, raised a routing alarm.

    The trainer saves the last step of a process itself. This hook follows all that write, so that
    everything about a step is on disk before the checkpoint from which a run resumes. A failed save
    ends the run, or is repeated after one step, two more, four more, and at each step that is due
    (``watch.checkpoint.on_failure``).
    """

    def __init__(self, policy: CheckpointPolicy, console: Console, on_alarm: bool = False) -> None:
        self._policy = policy
        self._console = console
        self._on_alarm = on_alarm
        self._retry_step: int | None = None
        self._retry_delay = 1

    def load_state(self, state: HookState) -> None:
        """Forget failed saves: the checkpoint that was read was written."""
        self._retry_step = None
        self._retry_delay = 1

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save if the step is due, or if an earlier save that failed is to be repeated."""
        step = job.step_number
        every = self._policy.every
        due = every is not None and step % every == 0
        due = due or (self._retry_step is not None and step >= self._retry_step)
        due = due or (self._on_alarm and metrics.get(ALARMS_KEY, 0) > 0)
        if not due or step >= job.last_step:
            return
        try:
            started = time.monotonic()
            job.save()
            self._retry_step = None
            self._retry_delay = 1
            stall_s = time.monotonic() - started
            log_event(job.folder, "saved", step=step, stall_s=stall_s)
        except SaveError as error:
            if self._policy.on_failure == "stop":
                raise
            self._retry_step = step + self._retry_delay
            self._retry_delay = 2 * self._retry_delay
            if every is not None:
                self._retry_step = min(self._retry_step, step - step % every + every)
            self._console.print(
                f"[bold red]checkpoint failed[/] step {step}: {escape(str(error))}\n"
                f"training continues; the next attempt is at step {self._retry_step}",
                soft_wrap=True,
                highlight=False,
            )
