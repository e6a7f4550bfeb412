"""Ctrl-C from a terminal: answered at once, by one line, and at any moment of start-up the end."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moefold.training.distributed import MESSAGES
from tests.cpu.runs import own_data

ROOT = Path(__file__).parents[2]
MARK = "MOEFOLD_TEST_INTERRUPT"
LONG = ("train.batch=8192", "watch.plots=null", "watch.sample=null", "watch.evaluate=null")
"""Steps that last longer than a test waits."""
LIMIT_S = 120.0

AT_IMPORT = """
import os, signal, sys
at, seen = int(sys.argv.pop(1)), 0
def heard(event, args):
    global seen
    if event == "import":
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGINT)
from moefold.cli.main import main
sys.addaudithook(heard)
sys.exit(main())
"""


def some(kept: Sequence[int], others: Sequence[int]) -> list[Any]:
    """Return parameters of which ``make matrix`` has the others."""
    return [*kept, *(pytest.param(one, marks=pytest.mark.matrix) for one in others)]


@pytest.mark.parametrize("at", some([1, 160, 1100], [40, 120, 500]))
def test_an_interrupt_while_modules_are_imported_ends_the_command(at: int, tmp_path: Path) -> None:
    """Import number ``at`` of those of a command that needs torch."""
    words = [sys.executable, "-c", AT_IMPORT, str(at), "doctor"]
    ended = subprocess.run(words, cwd=tmp_path, env=environ(), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped\n")


class Terminal:
    """A command that a terminal runs: its processes are a group, its output a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moefold", *words],
                cwd=folder,
                env=environ() | {MARK: self.mark},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def said(self) -> str:
        return self.output.read_text()

    def until_said(self, text: str) -> None:
        """Wait for a text."""
        for _ in moments(text):
            assert self.process.poll() is None, self.said()
            if text in self.said():
                return

    def until_there(self, count: int) -> None:
        """Wait for as many living processes."""
        for _ in moments(f"{count} processes"):
            if len(self.processes()) >= count or self.process.poll() is not None:
                return

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                given = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in given:
                found.append(int(entry.name))
        return found

    def ended(self) -> int:
        """Return the exit status, once nothing of the command is left."""
        status = self.process.wait(LIMIT_S)
        for _ in moments("the end of all processes"):
            if not self.processes():
                break
        return status


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        for process in terminal.processes():
            os.kill(process, signal.SIGKILL)
        terminal.process.wait()


@pytest.mark.parametrize("ranks", some([2], [1, 4]))
def test_the_first_is_answered_within_the_step_and_the_second_ends_it(
    tmp_path: Path, terminals: list[Terminal], ranks: int
) -> None:
    many = ("--nproc", str(ranks), "--folder", "out", *own_data(tmp_path))
    shown = Terminal(tmp_path, "train", "tiny", *many, *LONG)
    terminals.append(shown)
    shown.until_said("╰")
    time.sleep(0.5)  # of the banner, until the loop hears: what comes before ends the start
    shown.interrupt()
    shown.until_said(MESSAGES.first)
    shown.interrupt()
    assert shown.ended() == 130
    assert shown.said().count(MESSAGES.first) == 1
    assert shown.said().splitlines()[-1] == MESSAGES.second
    assert "Traceback" not in shown.said()
    assert not list((tmp_path / "out").glob("step_*")), "the step had ended"


@pytest.mark.slow
@pytest.mark.parametrize("count", some([5], [3, 7]))
def test_an_interrupt_while_ranks_start_is_one_line(
    tmp_path: Path, terminals: list[Terminal], count: int
) -> None:
    """From the server that ranks fork from, the third process, to the last of four ranks."""
    shown = Terminal(tmp_path, "train", "tiny", "--nproc", "4", *own_data(tmp_path), *LONG)
    terminals.append(shown)
    shown.until_there(count)
    shown.interrupt()
    assert shown.ended() == 130
    lines = [line for line in shown.said().splitlines() if line != MESSAGES.first]
    assert lines == ["stopped"]


def moments(awaited: str) -> Iterator[None]:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        yield
        time.sleep(0.02)
    pytest.fail(f"no sign of {awaited}")


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
