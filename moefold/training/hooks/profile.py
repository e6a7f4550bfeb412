"""Chrome traces of chosen steps; open them in ``chrome://tracing`` or ``ui.perfetto.dev``.

Beside each trace, which is rank 0's, are the walls of the step: the parts that its seconds consist
of, measured on all ranks.
"""

import json

from moefold.files import plain, write_text
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Profile
from moefold.training.run_folder import TRACES, WALLS_SUFFIX


class ProfileHook(Hook):
    """Ends the trace of a step and writes it; the first hook, so that no other is in the trace."""

    def __init__(self, record: Profile) -> None:
        self.steps = frozenset(record.steps)
        self.running = False

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write ``profile/step_<n>.json`` and the step's walls if this step was traced."""
        if not self.running:
            return
        self.running = False
        folder = job.folder / TRACES
        folder.mkdir(exist_ok=True)
        name = f"step_{job.step_number}"
        walls = job.stop_trace(str(folder / f"{name}.json"))
        text = json.dumps(plain({"step": job.step_number, **walls}), allow_nan=False)
        write_text(folder / f"{name}{WALLS_SUFFIX}", text + "\n")

    def on_rewind(self, job: JobView) -> None:
        """Discard the trace: the step that it was started for was rewound."""
        self.on_stop(job, None)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Discard the trace of a step that has not ended."""
        if self.running:
            self.running = False
            job.stop_trace(None, failed=error is not None)


class ProfileStart(Hook):
    """Starts the trace of the next step; the last hook."""

    def __init__(self, profile: ProfileHook) -> None:
        self._profile = profile

    def on_start(self, job: JobView) -> None:
        """Start a trace if the first step is to be traced."""
        self._start_before(job, job.step_number + 1)

    on_rewind = on_start

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Start a trace if the next step is to be traced."""
        if job.step_number < job.last_step:
            self._start_before(job, job.step_number + 1)

    def _start_before(self, job: JobView, step: int) -> None:
        if step in self._profile.steps:
            job.start_trace()
            self._profile.running = True
