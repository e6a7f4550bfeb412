"""Notes the data of steps whose gradient is far larger than it was of late."""

from collections import deque
from statistics import median

from rich.console import Console

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Spikes
from moefold.training.hooks.events import note

FEWEST = 8
"""Steps that say what is usual."""


class SpikesHook(Hook):
    """Compares each step's gradient norm with the median of those before it.

    A step is a function of its place in the data's order and of the weights before it, so
    ``Job.step`` on the checkpoint before it, or a folder forked there, makes it again.
    """

    def __init__(self, record: Spikes, console: Console) -> None:
        self._record, self._console = record, console
        self._norms: deque[float] = deque(maxlen=record.of)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Note a spike with its documents; it counts for nothing in what is usual."""
        norm = metrics.get("grad_norm")
        if norm is None:
            return
        usual = median(self._norms) if len(self._norms) >= FEWEST else None
        if usual is None or norm <= self._record.ratio * usual:
            self._norms.append(norm)
            return
        batches = (job.loader.step_part(job.place, j) for j in range(job.loader.micro_batches))
        named = (f"{o.name} {o.document}" for batch in batches for o in batch.sources)
        facts = {"step": job.step_number, "place": job.place, "grad_norm": norm, "usual": usual}
        note(job.folder, "spike", **facts, documents=list(dict.fromkeys(named)))
        self._console.print(
            f"[bold yellow]spike[/] step {job.step_number}: gradient norm {norm:.3g}, of late "
            f"{usual:.3g}; its documents stand in events.jsonl",
            soft_wrap=True,
            highlight=False,
        )
