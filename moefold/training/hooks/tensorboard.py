"""Metrics as TensorBoard events, in ``tensorboard/``."""

from importlib.util import find_spec
from typing import Any

from moefold.training.hooks.base import Figures, Hook, JobView

HOW = (
    "watch.metrics.tensorboard is on, but the package is missing: "
    "pip install 'moefold[tensorboard]'"
)


class TensorBoardHook(Hook):
    """Writes each figure under its own key."""

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError(HOW)
        self._writer: Any = None

    def on_start(self, job: JobView) -> None:
        """Open the event file; events after the checkpoint's step are hidden from the curves."""
        # Imported here: it takes a second, and a run without it must not pay.
        from torch.utils.tensorboard import SummaryWriter

        purge = job.step_number + 1 if job.step_number else None
        self._writer = SummaryWriter(str(job.folder / "tensorboard"), purge_step=purge)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write one scalar per figure."""
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, job.step_number)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Write out and close the event file."""
        if self._writer is not None:
            self._writer.close()
