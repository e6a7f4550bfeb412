"""What the run is and when it started, went on and ended: ``run.yaml`` and ``events.jsonl``.

Its tokenizer lies beside them as ``tokenizer.json``, for other runs to use.
"""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moefold.config.dump import dump_yaml
from moefold.files import write_text
from moefold.training.history import EVENTS_FILE
from moefold.training.hooks.base import Hook, JobView

RUN_FILE = "run.yaml"
TOKENIZER_FILE = "tokenizer.json"


class EventsHook(Hook):
    """Keeps the resolved run file, and a line for each start and each orderly end of a process."""

    def on_start(self, job: JobView) -> None:
        """Write run file and tokenizer; note the start and the step it goes on from."""
        write_text(job.folder / RUN_FILE, dump_yaml(job.run))
        job.tokenizer.save(job.folder / TOKENIZER_FILE)
        recovered = job.recovered
        if recovered:
            recovered = {**recovered, "load_s": time.time() - recovered["met"]}
        note(
            job.folder,
            "start",
            step=job.step_number,
            **({"recovered": recovered} if recovered else {}),
        )

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Note the end, and what it was."""
        reason = "end" if error is None else f"{type(error).__name__}: {error}"
        note(job.folder, "stop", step=job.step_number, reason=reason)


def note(folder: Path, event: str, **values: Any) -> None:
    """Add an event to a run's, with the time and the process."""
    path = folder / EVENTS_FILE
    now = time.time()
    stamp = {"time": now, "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")}
    line = json.dumps({"event": event, **values, **stamp, "process": os.getpid()}) + "\n"
    with open(path, "a+b", buffering=0) as file:
        # A kill can leave the line before unfinished.
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * torn + line.encode())
