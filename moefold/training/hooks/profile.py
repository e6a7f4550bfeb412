"""Chrome traces of chosen steps; open them in ``chrome://tracing`` or ``ui.perfetto.dev``."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Profile


class ProfileHook(Hook):
    """Ends the trace of a step and writes it; the first hook, so that no other is in the trace."""

    def __init__(self, record: Profile) -> None:
        self.steps = frozenset(record.steps)
        self.running: Any = None

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write ``profile/step_<n>.json`` if this step was traced."""
        if self.running is None:
            return
        self.running.stop()
        folder = job.folder / "profile"
        folder.mkdir(exist_ok=True)
        self.running.export_chrome_trace(str(folder / f"step_{job.step_number}.json"))
        self.running = None

    def on_rewind(self, job: JobView) -> None:
        """Discard the trace: the step that it was started for was rewound."""
        self.on_stop(job, None)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Stop a profiler that is still running because the step failed."""
        if self.running is not None:
            self.running.stop()
            self.running = None


class ProfileStart(Hook):
    """Starts the trace of the next step; the last hook."""

    def __init__(self, profile: ProfileHook) -> None:
        self._profile = profile

    def on_start(self, job: JobView) -> None:
        """Start a trace if the first step is to be traced."""
        self._start_before(job.step_number + 1)

    on_rewind = on_start

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Start a trace if the next step is to be traced."""
        if job.step_number < job.last_step:
            self._start_before(job.step_number + 1)

    def _start_before(self, step: int) -> None:
        if step in self._profile.steps:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile.running = torch.profiler.profile(activities=activities)
            self._profile.running.start()
