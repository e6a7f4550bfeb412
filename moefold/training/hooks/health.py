"""How evenly the experts are used, layer by layer, and an alarm when routing collapses."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from moefold.training.history import LOAD_FILE
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Health
from moefold.training.hooks.lines import StepLines

ALARMS = "moe/alarms"
"""Key of the number of layers whose alarm was raised at this step."""
OWN_PLACE = ("layer", "top_k", "load")
"""What is no figure of ``moe/<layer>/``."""


class RoutingCollapse(ValueError):
    """The run was told to stop when its routing collapses, and it did."""


class HealthHook(Hook):
    """Adds ``moe/<layer>/<quantity>`` to the figures and writes each expert's share of the load.

    A layer is in trouble when too many of its experts get no token, or the busiest one gets too
    much; after ``patience`` checks in a row its alarm is raised, once until it recovers.
    """

    def __init__(self, record: Health, console: Console) -> None:
        self._record = record
        self._console = console
        self._failed: dict[str, int] = {}
        self._lines = StepLines(LOAD_FILE)

    def on_start(self, job: JobView) -> None:
        """Drop the loads of steps after the checkpoint that the run continues from."""
        self._lines.open(job.folder, job.step_number)

    def on_rewind(self, job: JobView) -> None:
        """Drop the lines of the steps that are made again."""
        self._lines.rewind(job.step_number)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Look at the layers where the step is due."""
        due = job.step_number % self._record.every == 0 or job.step_number == job.last_step
        layers = job.health() if due else []
        if not layers:
            return
        loads: dict[str, list[float]] = {}
        alarms = 0
        for figures in layers:
            layer = str(figures["layer"])
            loads[layer] = [round(float(share), 6) for share in figures["load"]]
            for key, value in figures.items():
                if key not in OWN_PLACE:
                    metrics[f"moe/{layer}/{key}"] = value
            trouble = self.trouble(figures)
            self._failed[layer] = self._failed.get(layer, 0) + 1 if trouble else 0
            if self._failed[layer] == self._record.patience:
                alarms += 1
                self._console.print(
                    f"[bold red]routing alarm[/] step {job.step_number}, layer {layer}: {trouble}, "
                    f"{self._record.patience} checks in a row",
                    soft_wrap=True,
                    highlight=False,
                )
        metrics[ALARMS] = alarms
        self._lines.append(job.step_number, {"load": loads})

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Make the file durable."""
        self._lines.close()

    def trouble(self, figures: Mapping[str, Any]) -> str:
        """Say what is wrong with one layer's figures; empty when nothing is."""
        experts = len(figures["load"])
        dead = figures["dead_experts"]
        ratio = figures["load_max_over_mean"]
        if dead >= self._record.dead_share * experts:
            return f"{dead:.0f} of {experts} experts get no token"
        limit = self._record.load_ratio
        if limit is None:
            limit = 0.75 * experts / figures["top_k"]
        if limit > 1 and ratio >= limit:
            return f"the busiest expert gets {ratio:.1f} times the mean"
        return ""


class AlarmHook(Hook):
    """Does what an alarm asks for, after the step's figures are written."""

    def __init__(self, record: Health) -> None:
        self._action = record.action

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save, or save and stop, when a layer's alarm was raised at this step."""
        alarms = metrics.get(ALARMS, 0)
        if not alarms:
            return
        if self._action != "warn":
            path = job.save()
        if self._action == "stop":
            raise RoutingCollapse(
                f"routing alarm in {alarms} layer(s) at step {job.step_number}, and "
                f"watch.health.action is stop; saved {path}. Raise the balancing term, lower "
                "optim.lr, or continue with watch.health.action=warn"
            )
