"""Progress on the console: a live bar or plain lines, and a forecast of time and memory."""

import math
import resource
import sys
import time
from datetime import datetime, timedelta

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from moefold.training.formatting import clock, count, plural, size
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import ProgressDisplay
from moefold.training.run_folder import held_out_sets

SMOOTHING = 0.95
"""Weight of the past in the running mean of wall time per step."""
FORECAST_STEPS = 3
"""Number of steps before the forecast, of which the first, the warm-up, is left out."""


class ProgressHook(Hook):
    """Shows step, loss, tokens/s, MFU and time left; once, after a few steps, a forecast.

    The time left follows from a running mean of wall time per step, time outside steps included.
    """

    def __init__(self, record: ProgressDisplay, console: Console) -> None:
        style = record.style
        if style == "auto":
            style = "bar" if console.is_terminal else "lines"
        self._style = style
        self._seconds = record.seconds
        self._console = console
        self._bar: Bar | None = None
        if style == "bar":
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TextColumn("[dim]{task.fields[left]} left"),
                console=console,
                expand=True,
                refresh_per_second=4,
            )
        self._shown = float("-inf")
        # When the last step ended; the sum of seconds per step, and of its weights.
        self._last = self._sum = self._weight = 0.0
        self._first_s: list[float] = []

    def on_start(self, job: JobView) -> None:
        """Show the bar, at the step from which the run continues."""
        self._last = time.monotonic()
        if self._bar is not None:
            total = job.last_step
            done = job.step_number
            self._bar.add_task(job.run.name, total=total, completed=done, facts="", left="–")
            self._bar.start()

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Move the bar, or print a line if the last one is old enough."""
        now = time.monotonic()
        steps = job.last_step - job.step_number
        self._sum = SMOOTHING * self._sum + (now - self._last)
        self._weight = SMOOTHING * self._weight + 1
        self._last = now
        time_left = clock(steps * self._sum / self._weight)
        facts = format_metrics(metrics)
        if metrics.get("skipped"):
            text = _skip_reason(job, metrics)
            self._print(f"[bold yellow]skipped[/] step {job.step_number}: {text}")
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=job.step_number, facts=facts, left=time_left)
        elif self._style == "lines" and (now - self._shown >= self._seconds or steps <= 0):
            self._shown = now
            self._print(f"step {job.step_number}/{job.last_step}  {facts}  {time_left} left")
        if len(self._first_s) < FORECAST_STEPS and "step_time_s" in metrics:
            self._first_s.append(metrics["step_time_s"])
            if len(self._first_s) == FORECAST_STEPS and steps > 0:
                self._forecast(steps)

    def _forecast(self, steps: int) -> None:
        """Print when the run will end, from the first steps, and the peak memory so far."""
        step_s = sum(self._first_s[1:]) / (FORECAST_STEPS - 1)
        left_s = steps * step_s
        end = datetime.now() + timedelta(seconds=left_s)
        end_text = end.strftime("%H:%M" if left_s < 12 * 3600 else "%d %B %H:%M")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        self._print(
            f"[cyan]measured[/] {1000 * step_s:.0f} ms a step, {plural(steps, 'step')} to go: "
            f"{clock(left_s)} plus evaluation, so until about {end_text}; peak memory {size(peak)}"
        )

    def on_rewind(self, job: JobView) -> None:
        """Say to which step the run returned, and why."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=job.step_number)
        text = "a step was not finite; its data are left out from now on"
        self._print(f"[bold yellow]rewound[/] to step {job.step_number}: {text}")

    def on_evaluate(self, job: JobView, metrics: Figures) -> None:
        """Print the held-out result: ``loss 2.91  stdlib 2.044 bits per byte``."""
        parts = [f"loss {metrics['val_loss']:.3f}"] if "val_loss" in metrics else []
        parts += [
            f"{name} {metrics[key]:.3f} bits per byte" for name, key in held_out_sets(metrics)
        ]
        if parts:  # else nothing is held out
            self._print(f"[cyan]validation[/] step {job.step_number}  {'  '.join(parts)}")

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Stop the bar; it stays on the console."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        if self._style != "off":
            self._console.print(text, soft_wrap=True, highlight=False)


def format_metrics(metrics: Figures) -> str:
    """Format a step's main metrics: ``loss 3.214  12.3k tokens/s  MFU 34 %``."""
    parts = []
    if "lm_loss" in metrics:
        parts.append(f"loss {metrics['lm_loss']:.3f}")
    if "tokens_per_s" in metrics:
        parts.append(f"{count(metrics['tokens_per_s'])} tokens/s")
    rates = {"mfu_of_peak": "of the chip's peak", "mfu": "of the measured rate"}
    reported = [(100 * metrics[key], rate) for key, rate in rates.items() if key in metrics]
    if reported:
        texts = (f"{mfu:.0f} %" + f" {rate}" * (len(reported) > 1) for mfu, rate in reported)
        parts.append("MFU " + ", ".join(texts))
    return "  ".join(parts)


def _skip_reason(job: JobView, metrics: Figures) -> str:
    """Say why a step updated nothing, and how many did not."""
    bound = job.run.train.skip_norm
    norm = metrics.get("grad_norm", math.nan)
    reason = "loss or gradients are not finite"
    if bound is not None and bound.above < norm < math.inf:
        reason = f"its gradient norm of {norm:.4g} is above train.skip_norm.above ({bound.above:g})"
    return f"{reason}; nothing was updated ({metrics['skipped_steps']} skipped so far)"
