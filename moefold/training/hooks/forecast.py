"""What the run will take, said once it is measured: step time, end, peak memory."""

import resource
import sys
from datetime import datetime, timedelta

import torch
from rich.console import Console

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.words import clock, size

AFTER = 3
"""Steps of this process before the forecast; the first one warms up and is left out."""


class ForecastHook(Hook):
    """Prints one line after a few steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._times: list[float] = []

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Note the time of the first steps; then say it."""
        if len(self._times) > AFTER or "step_time_s" not in metrics:
            return
        self._times.append(metrics["step_time_s"])
        if len(self._times) == AFTER and job.step_number < job.last_step:
            self._times.append(0.0)
            step = sum(self._times[1:AFTER]) / (AFTER - 1)
            left = step * (job.last_step - job.step_number)
            end = datetime.now() + timedelta(seconds=left)
            at = end.strftime("%H:%M" if left < 12 * 3600 else "%d %B %H:%M")
            self._console.print(
                f"[cyan]measured[/] {1000 * step:.0f} ms a step, {job.last_step - job.step_number} "
                f"steps to go: {clock(left)} and what evaluation takes, so about {at}; "
                f"peak memory {size(peak_memory())}",
                soft_wrap=True,
                highlight=False,
            )


def peak_memory() -> int:
    """Return the most bytes that this process has held: of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
