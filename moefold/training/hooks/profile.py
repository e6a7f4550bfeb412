"""Chrome traces of chosen steps; open them in ``chrome://tracing`` or ``ui.perfetto.dev``."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Profile


class ProfileHook(Hook):
    """Ends the trace of a step and writes it; stands first, so no other hook is in the trace."""

    def __init__(self, record: Profile) -> None:
        self.steps = frozenset(record.steps)
        self.running: Any = None

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write ``profile/step_<n>.json`` when this step was traced."""
        if self.running is None:
            return
        self.running.stop()
        folder = job.folder / "profile"
        folder.mkdir(exist_ok=True)
        self.running.export_chrome_trace(str(folder / f"step_{job.step_number}.json"))
        self.running = None

    def on_rewind(self, job: JobView) -> None:
        """Drop the trace of a step that led to another one than it was begun for."""
        self.on_stop(job, None)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Leave no profiler running when the step failed."""
        if self.running is not None:
            self.running.stop()
            self.running = None


class ProfileStart(Hook):
    """Starts the trace of the next step; stands last."""

    def __init__(self, profile: ProfileHook) -> None:
        self._profile = profile

    def on_start(self, job: JobView) -> None:
        """The first step may be one of those."""
        self._start_before(job.step_number + 1)

    on_rewind = on_start

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """The next step may be one of those."""
        if job.step_number < job.last_step:
            self._start_before(job.step_number + 1)

    def _start_before(self, step: int) -> None:
        if step in self._profile.steps:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile.running = torch.profiler.profile(activities=activities)
            self._profile.running.start()
