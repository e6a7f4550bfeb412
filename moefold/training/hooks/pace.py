"""Says which rank holds the others up."""

from statistics import median

from rich.console import Console

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Pace


class PaceHook(Hook):
    """Compares what ranks were busy with between two looks, their waits for each other left out.

    On CUDA these are the host's seconds, which a slow device shows in only where the host waits.
    """

    def __init__(self, record: Pace, console: Console) -> None:
        self._record, self._console = record, console
        self._slow: dict[int, int] = {}

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Look, every so many steps; warn of a rank that was slow several times in a row."""
        record = self._record
        if job.world.size == 1 or job.step_number % record.every:
            return
        busy = job.pace()
        usual = median(busy)
        slowest = max(range(len(busy)), key=lambda rank: busy[rank])
        metrics["pace/slowest_rank"] = slowest
        metrics["pace/slowest_over_median"] = busy[slowest] / usual if usual else 1.0
        slow = {rank for rank, seconds in enumerate(busy) if seconds > record.ratio * usual}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        for rank, times in self._slow.items():
            if times == record.patience:
                text = (
                    f"[bold yellow]slow rank[/] step {job.step_number}: rank {rank} was busy for "
                    f"{busy[rank]:.2f} s in {record.every} steps, the ranks' median is "
                    f"{usual:.2f} s; the others waited for it. Look at its machine"
                )
                self._console.print(text, soft_wrap=True, highlight=False)
