"""The second signal of a kind does not wait for the step, and what was saved before stands."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moefold.training.distributed import MESSAGES
from moefold.training.hooks.base import Hook
from tests.cpu.checkpoint_tools import run_child
from tests.cpu.runs import job_of


class Impatient(Hook):
    """Saves at step 2, and is asked to end twice at step 4."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step(self, job: Any, metrics: Any) -> None:
        if job.step_number == 2:
            job.save()
        if job.step_number == 4:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, number: int) -> None:
    """Case 20."""

    def work() -> None:
        try:
            job_of(tmp_path, "out", Impatient(number)).train()
        except KeyboardInterrupt as stopped:
            assert number == signal.SIGINT and str(stopped) == MESSAGES.second
            signal.raise_signal(signal.SIGKILL)

    assert run_child(work) == (-signal.SIGKILL if number == signal.SIGINT else -number)
    with job_of(tmp_path, "out") as job:
        assert job.step_number == 2
