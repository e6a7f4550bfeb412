"""Progress on the console: a live bar or plain lines, and a forecast of time and memory."""

import resource
import sys
import time
from datetime import datetime, timedelta

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Progress
from moefold.training.words import clock, count, size

SMOOTHING = 0.95
"""Share of the past in the running mean of wall time per step."""
AFTER = 3
"""Steps of this process before the forecast; the first one warms up and is left out."""


class TimeLeft:
    """Estimates the time to go by a running mean of wall time per step, all but the step included.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._last = self._sum = self._weight = 0.0

    def start(self, now: float) -> None:
        """Begin to measure."""
        self._last = now

    def step(self, now: float) -> None:
        """Count one more step that is done."""
        self._sum = SMOOTHING * self._sum + (now - self._last)
        self._weight = SMOOTHING * self._weight + 1
        self._last = now

    def left(self, steps: int) -> str:
        """Word how long ``steps`` more take: ``4:05``, or a dash before anything is measured."""
        return clock(steps * self._sum / self._weight) if self._weight else "–"


class ProgressHook(Hook):
    """Shows step, loss, tokens/s, MFU and time left."""

    def __init__(self, record: Progress, console: Console) -> None:
        style = record.style
        if style == "auto":
            style = "bar" if console.is_terminal else "lines"
        self._style, self._seconds, self._console = style, record.seconds, console
        self._bar = _bar(console) if style == "bar" else None
        self._time = TimeLeft()
        self._shown = float("-inf")

    def on_start(self, job: JobView) -> None:
        """Show the bar at the step the run continues from."""
        self._time.start(time.monotonic())
        if self._bar is not None:
            total, done = job.last_step, job.step_number
            self._bar.add_task(job.run.name, total=total, completed=done, facts="", left="–")
            self._bar.start()

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Move the bar, or print a line where the last one is old enough."""
        now = time.monotonic()
        self._time.step(now)
        left = self._time.left(job.last_step - job.step_number)
        facts = describe(metrics)
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=job.step_number, facts=facts, left=left)
        elif self._style == "lines":
            due = now - self._shown >= self._seconds or job.step_number >= job.last_step
            if due:
                self._shown = now
                text = f"step {job.step_number}/{job.last_step}  {facts}  {left} left"
                self._console.print(text, soft_wrap=True, highlight=False)

    def on_evaluate(self, job: JobView, metrics: Figures) -> None:
        """Print the held-out result as a line of its own."""
        if self._style != "off":
            text = f"[cyan]validation[/] step {job.step_number}  {describe_validation(metrics)}"
            self._console.print(text, soft_wrap=True, highlight=False)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TextColumn("[dim]{task.fields[left]} left"),
        console=console,
        expand=True,
        refresh_per_second=4,
    )


def describe(metrics: Figures) -> str:
    """Say the step's figures in a few words: ``loss 3.214  12.3k tokens/s  MFU 34 %``."""
    parts = []
    if "lm_loss" in metrics:
        parts.append(f"loss {metrics['lm_loss']:.3f}")
    if "tokens_per_s" in metrics:
        parts.append(f"{count(metrics['tokens_per_s'])} tokens/s")
    shares = {"mfu_of_peak": "of the chip's peak", "mfu": "of the measured rate"}
    found = {said: 100 * metrics[name] for name, said in shares.items() if name in metrics}
    if found:
        two = len(found) > 1
        texts = (f"{share:.0f} %" + f" {said}" * two for said, share in found.items())
        parts.append("MFU " + ", ".join(texts))
    return "  ".join(parts)


def describe_validation(metrics: Figures) -> str:
    """Say an evaluation in a few words: ``loss 2.91  stdlib 2.044 bits per byte``."""
    parts = [f"loss {metrics['val_loss']:.3f}"] if "val_loss" in metrics else []
    for key, value in metrics.items():
        if key.startswith("val/") and key.endswith("/bits_per_byte"):
            name = key.removeprefix("val/").removesuffix("/bits_per_byte")
            parts.append(f"{name} {value:.3f} bits per byte")
    return "  ".join(parts)


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
