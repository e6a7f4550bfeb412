"""Logs of a run: ``run.yaml``, ``events.jsonl``, ``metrics.jsonl``, TensorBoard and W&B."""

import time
from importlib.util import find_spec
from typing import Any

from moefold.config.dump import dump_yaml
from moefold.files import read_json, write_json, write_text
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Wandb
from moefold.training.run_folder import METRICS_FILE, RUN_FILE, TOKENIZER_FILE, StepLines, log_event

WANDB_FILE = "wandb.json"


class EventsHook(Hook):
    """Writes the resolved run file, and an event for each start and orderly end of a process."""

    def on_start(self, job: JobView) -> None:
        """Write run file and tokenizer; log the start and the step from which it continues."""
        write_text(job.folder / RUN_FILE, dump_yaml(job.run))
        job.tokenizer.save(job.folder / TOKENIZER_FILE)
        facts: dict[str, Any] = {"loss": job.run.train.loss.kind}
        if job.recovered:
            load_s = time.time() - job.recovered["met"]
            facts["recovered"] = {**job.recovered, "load_s": load_s}
        log_event(job.folder, "start", step=job.step_number, **facts)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Log the end and its reason."""
        reason = "end" if error is None else f"{type(error).__name__}: {error}"
        log_event(job.folder, "stop", step=job.step_number, reason=reason)


class StepLinesHook(Hook):
    """Base of hooks that write one line per step, each step once, also after a resume."""

    def __init__(self, file: str) -> None:
        self.lines = StepLines(file)

    def on_start(self, job: JobView) -> None:
        """Drop the lines of steps after the one from which the run continues."""
        self.lines.open(job.folder, job.step_number)

    on_rewind = on_start

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Sync the file to disk and close it."""
        self.lines.close()


class MetricsHook(StepLinesHook):
    """Writes ``metrics.jsonl``: one object per step."""

    def __init__(self) -> None:
        super().__init__(METRICS_FILE)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write the line of this step."""
        self.lines.append(job.step_number, {k: v for k, v in metrics.items() if k != "step"})


class TensorBoardHook(Hook):
    """Writes each metric as a TensorBoard scalar under its key, in ``tensorboard/``."""

    def __init__(self) -> None:
        _require_package("tensorboard", "on")
        self._writer: Any = None

    def on_start(self, job: JobView) -> None:
        """Open the event file; events after the checkpoint's step are hidden from the curves."""
        # Imported here: it takes a second, which runs without TensorBoard must not pay.
        from torch.utils.tensorboard import SummaryWriter

        purge = job.step_number + 1 if job.step_number else 0
        self._writer = SummaryWriter(str(job.folder / "tensorboard"), purge_step=purge)

    def on_rewind(self, job: JobView) -> None:
        """Hide the events of the steps that are repeated."""
        self.on_stop(job, None)
        self.on_start(job)

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Write one scalar per metric."""
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, job.step_number)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbHook(Hook):
    """Sends each step's metrics to W&B; a resumed run continues under the same name and id."""

    def __init__(self, record: Wandb) -> None:
        _require_package("wandb", "set")
        self._record = record
        self._run: Any = None

    def on_start(self, job: JobView) -> None:
        """Open a run at W&B, or continue the one whose id is in the folder."""
        # Imported here: it is optional, slow to import, and starts another process.
        import wandb

        path = job.folder / WANDB_FILE
        try:
            self._run = wandb.init(
                **self._record.model_dump(),
                name=job.run.name,
                dir=str(job.folder),
                id=read_json(path)["id"] if path.exists() else None,
                resume="allow",
                config=job.run.model_dump(mode="json"),
            )
        except (wandb.Error, ConnectionError, TimeoutError) as error:
            raise ValueError(
                f"W&B cannot open the run: {error}; log in and check the network, or set "
                "watch.metrics.wandb.mode=offline to upload it later, or watch.metrics.wandb=null "
                "to train without W&B"
            ) from error
        write_json(path, {"id": self._run.id})

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Send the metrics of this step."""
        self._run.log(dict(metrics), step=job.step_number)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Finish the run at W&B with exit code 0 or 1."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _require_package(package: str, setting: str) -> None:
    if find_spec(package) is None:
        raise ValueError(
            f"watch.metrics.{package} is {setting}, but the package is not installed: "
            f"pip install 'moefold[{package}]'"
        )
