"""Alarms: collapsed routing, slow ranks (stragglers), and spikes of the gradient norm."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.console import Console

from moefold.training.hooks.base import Figures, Hook, HookState, JobView
from moefold.training.hooks.config import Health, Pace, Spikes
from moefold.training.hooks.logs import StepLinesHook
from moefold.training.run_folder import LOAD_FILE, METRICS_FILE, log_event, read_lines

ALARMS_KEY = "moe/alarms"
"""Key of the number of layers whose alarm was raised at this step."""
UNWRITTEN_KEYS = ("layer", "top_k", "load")
"""Keys of a layer's statistics that are not written as ``moe/<layer>/<key>``."""
MIN_NORMS = 8
"""Minimum number of steps for a median of gradient norms."""


class RoutingCollapse(ValueError):
    """The run stopped because its routing collapsed and ``watch.health.action`` is ``stop``."""


class HealthHook(StepLinesHook):
    """Adds ``moe/<layer>/<quantity>`` to the metrics and writes each expert's share of the load.

    A layer fails a check if too many of its experts get no token, or the busiest one gets too
    many; ``patience`` consecutive failures raise its alarm, once until it recovers. Only checks at
    multiples of ``every`` count: that at a process's last step is for the figures.
    """

    def __init__(self, record: Health, console: Console) -> None:
        super().__init__(LOAD_FILE)
        self._record = record
        self._console = console
        self._failed: dict[str, int] = {}
        """Consecutive failed checks of each layer that failed the last one."""

    def state(self) -> HookState:
        """Return the counts of failed checks."""
        return {"failed": self._failed}

    def load_state(self, state: HookState) -> None:
        """Continue the counts of a checkpoint."""
        self._failed = dict(state.get("failed", {}))

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Check the layers if the step is due."""
        counts = job.step_number % self._record.every == 0
        due = counts or job.step_number == job.last_step
        layers = job.health() if due else []
        if not layers:
            return
        failed = dict[str, int]()
        loads: dict[str, list[float]] = {}
        alarms = 0
        for figures in layers:
            layer = str(figures["layer"])
            loads[layer] = [round(float(share), 6) for share in figures["load"]]
            for key, value in figures.items():
                if key not in UNWRITTEN_KEYS:
                    metrics[f"moe/{layer}/{key}"] = value
            problem = self.problem(figures)
            if not problem or not counts:
                continue
            failed[layer] = self._failed.get(layer, 0) + 1
            if failed[layer] == self._record.patience:
                alarms += 1
                text = f"layer {layer}: {problem} in {self._record.patience} consecutive checks"
                _warn(self._console, "[bold red]routing alarm[/]", f"{job.step_number}, {text}")
        metrics[ALARMS_KEY] = alarms
        if alarms and self._record.action == "stop":
            failed = {}  # a run that resumes there is alarmed again
        if counts:
            self._failed = failed
        self.lines.append(job.step_number, {"load": loads})

    def problem(self, figures: Mapping[str, Any]) -> str:
        """Describe what is wrong with one layer's statistics; empty if nothing is."""
        experts = len(figures["load"])
        dead = figures["dead_experts"]
        ratio = figures["load_max_over_mean"]
        if dead >= self._record.dead_share * experts:
            return f"{dead:.0f} of {experts} experts get no token"
        limit = self._record.load_ratio
        if limit is None:
            limit = 0.75 * experts / figures["top_k"]
        if limit > 1 and ratio >= limit:
            return f"the busiest expert gets {ratio:.1f} times the mean load"
        return ""


class AlarmHook(Hook):
    """Stops the run on a routing alarm if so configured, after the step's metrics are written."""

    def __init__(self, record: Health) -> None:
        self._action = record.action

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Save and stop if a layer's alarm was raised at this step."""
        alarms = metrics.get(ALARMS_KEY, 0)
        if alarms and self._action == "stop":
            raise RoutingCollapse(
                f"routing alarm in {alarms} layer(s) at step {job.step_number}, and "
                f"watch.health.action is stop; saved {job.save()}. Raise the balancing "
                "coefficient, lower optim.lr, or continue with watch.health.action=warn"
            )


class PaceHook(Hook):
    """Warns of stragglers: ranks that are busy longer than the others, waits excluded.

    Seconds are the host's: a slow CUDA device shows in them only where the host waits for it.
    """

    def __init__(self, record: Pace, console: Console) -> None:
        self._record = record
        self._console = console
        self._slow: dict[int, int] = {}

    def state(self) -> HookState:
        """Return how often in a row each slow rank was slow."""
        return {"slow": {str(rank): count for rank, count in self._slow.items()}}

    def load_state(self, state: HookState) -> None:
        """Continue the counts of a checkpoint; with another number of ranks they mean nothing."""
        self._slow = {int(rank): count for rank, count in state.get("slow", {}).items()}

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """If the step is due, check; warn of a rank that was slow ``patience`` times in a row."""
        record = self._record
        if job.world.size == 1 or job.step_number % record.every:
            return
        busy_s = job.pace()
        median_s = median(busy_s)
        slowest = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
        metrics["pace/slowest_rank"] = slowest
        metrics["pace/slowest_over_median"] = busy_s[slowest] / median_s if median_s else 1.0
        slow = {rank for rank, seconds in enumerate(busy_s) if seconds > record.ratio * median_s}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        for rank, count in self._slow.items():
            if count == record.patience:
                text = (
                    f"{job.step_number}: rank {rank} was busy for "
                    f"{busy_s[rank]:.2f} s in {record.every} steps, the median rank for "
                    f"{median_s:.2f} s, so the others waited for it; check its machine"
                )
                _warn(self._console, "[bold yellow]slow rank[/]", text)


class SpikesHook(Hook):
    """Compares each step's gradient norm with the median of the steps before.

    A step is a function of its batch in the data order and of the weights before it, so that
    ``Trainer.step`` from the checkpoint before it, or from a fork of that, reproduces it.
    """

    def __init__(self, record: Spikes, console: Console) -> None:
        self._record = record
        self._console = console
        self._norms: deque[float] = deque(maxlen=record.of)
        self._stored = False

    def state(self) -> HookState:
        """Return the recent gradient norms."""
        return {"norms": list(self._norms)}

    def load_state(self, state: HookState) -> None:
        """Continue with the norms of a checkpoint."""
        self._stored = "norms" in state
        self._norms.clear()
        self._norms.extend(state.get("norms", ()))

    def on_start(self, job: JobView) -> None:
        """Read the recent norms from ``metrics.jsonl`` if the checkpoint is too old to have any."""
        if self._stored:
            return
        self._norms.clear()
        for line in read_lines(job.folder / METRICS_FILE):
            if line["step"] <= job.step_number and line.get("grad_norm") is not None:
                self._exceeded_median(line["grad_norm"])

    on_rewind = on_start

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Log a spike with its documents; its norm does not enter the median."""
        norm = metrics.get("grad_norm")
        exceeded = None if norm is None else self._exceeded_median(norm)
        if norm is None or exceeded is None:
            return
        loader = job.loader
        index = job.batch_index
        batches = (loader.load_micro_batch(index, j) for j in range(loader.n_micro_batches(index)))
        documents = (f"{o.name} {o.document}" for batch in batches for o in batch.sources)
        facts = {"step": job.step_number, "place": index, "grad_norm": norm, "usual": exceeded}
        log_event(job.folder, "spike", **facts, documents=list(dict.fromkeys(documents)))
        text = (
            f"{job.step_number}: gradient norm {norm:.3g}, recent median {exceeded:.3g}; "
            "events.jsonl lists the step's documents"
        )
        _warn(self._console, "[bold yellow]spike[/]", text)

    def _exceeded_median(self, norm: float) -> float | None:
        """Return the median if ``norm`` is a spike; else note ``norm`` and return None."""
        median_norm = median(self._norms) if len(self._norms) >= MIN_NORMS else None
        if median_norm is not None and not norm <= self._record.ratio * median_norm:
            return median_norm
        if math.isfinite(norm):  # NaN would spoil the median.
            self._norms.append(norm)
        return None


def _warn(console: Console, label: str, text: str) -> None:
    console.print(f"{label} step {text}", soft_wrap=True, highlight=False)
