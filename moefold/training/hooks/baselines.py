"""What the result is set beside: ``baselines.json``, bits per byte on the held-out text."""

import json
from dataclasses import asdict

from rich.console import Console

from moefold.data.baselines import baselines
from moefold.files import write_text
from moefold.training.history import BASELINES_FILE, read_baselines
from moefold.training.hooks.base import Hook, JobView
from moefold.training.hooks.config import Evaluate


class BaselinesHook(Hook):
    """Measures them once, before the first step; a continued run has them already."""

    def __init__(self, record: Evaluate, console: Console) -> None:
        self._wanted = record.baselines
        self._console = console

    def on_start(self, job: JobView) -> None:
        """Measure, write the file and say the figures."""
        path = job.folder / BASELINES_FILE
        found = read_baselines(path)
        if set(found) != set(self._wanted):
            measured = asdict(baselines(job.loader.prepared))
            found = {name: measured[name] for name in self._wanted}
            write_text(path, json.dumps(found) + "\n")
        said = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        self._console.print(f"[cyan]to beat[/] {said} bits per byte", highlight=False)
