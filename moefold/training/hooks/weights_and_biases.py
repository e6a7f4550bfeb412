"""Metrics at Weights & Biases."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Wandb

HOW = "watch.metrics.wandb is set, but the package is missing: pip install 'moefold[wandb]'"
INSTEAD = (
    "log in and look at the network, or give watch.metrics.wandb.mode=offline to send it later, "
    "or watch.metrics.wandb=null to do without"
)
ID_FILE = "wandb.json"


class WandbHook(Hook):
    """Sends each step's figures; a continued run goes on under the same name and id."""

    def __init__(self, record: Wandb) -> None:
        if find_spec("wandb") is None:
            raise ValueError(HOW)
        self._record = record
        self._run: Any = None

    def on_start(self, job: JobView) -> None:
        """Open the run at the service, or continue the one this folder has begun."""
        # Imported here: it is optional, slow to import, and starts a process of its own.
        import wandb

        path = job.folder / ID_FILE
        record = self._record
        try:
            self._run = wandb.init(
                project=record.project,
                entity=record.entity,
                group=record.group,
                mode=record.mode,
                name=job.run.name,
                dir=str(job.folder),
                id=_known_id(path),
                resume="allow",
                config=job.run.model_dump(mode="json"),
            )
        except (wandb.Error, ConnectionError, TimeoutError) as error:
            raise ValueError(f"W&B does not take the run: {error}; {INSTEAD}") from error
        path.write_text(json.dumps({"id": self._run.id}) + "\n")

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Send the figures of this step."""
        self._run.log(dict(metrics), step=job.step_number)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Tell the service how the run ended."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _known_id(path: Path) -> str | None:
    return json.loads(path.read_text())["id"] if path.exists() else None
