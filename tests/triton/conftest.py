"""Gives each process of kernel tests one Triton: the interpreter, or the compiler.

Which one is chosen when Triton is imported. So a file's tests run here where the process is still
free or has chosen likewise; else the whole file is one test that runs in a process of its own.
``test_code_*`` files are compiled, all others interpreted, unless KERNEL_TESTS_ON names a device.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

MODE = "TRITON_INTERPRET"
APART = "KERNEL_TESTS_APART"
"""Names the file that a process was started for."""
SECONDS = 300
chosen: list[str] = []
"""What this process has chosen, if it has."""


def choose(mode: str) -> bool:
    """Say whether tests of a mode can run here, and choose it where nothing is chosen."""
    if not chosen and "torch" not in sys.modules:
        os.environ[MODE] = mode
        pytest.importorskip("triton", reason="kernels need Triton to be tested")
        # What tests start is not theirs to choose for.
        del os.environ[MODE]
        if mode == "1":
            _interpret()
        chosen.append(mode)
    return chosen == [mode]


def _interpret() -> None:
    from triton import knobs

    from tests.triton import exact, watch

    knobs.propagate_env = False
    knobs.runtime.interpret = True
    exact.install()
    watch.install()


class KernelTests(pytest.Module):
    """A file of kernel tests: its tests, or one that runs them all in another process."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collect the tests if they can run here."""
        on_device = os.environ.get("KERNEL_TESTS_ON") == "cuda"
        if choose("0" if on_device or self.path.name.startswith("test_code_") else "1"):
            return super().collect()
        if os.environ.get(APART) == self.path.name:
            raise self.CollectError("a fresh process has chosen its Triton before this file")
        return [WholeFile.from_parent(self, name="all")]


class WholeFile(pytest.Item):
    """Passes where all tests of its file do."""

    def runtest(self) -> None:
        """Run pytest on the file."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        env = os.environ | {APART: self.path.name}
        told = {"env": env, "capture_output": True, "text": True, "timeout": SECONDS}
        done = subprocess.run([*command, str(self.path)], **told)
        if done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            pytest.fail(done.stdout[-8000:] + done.stderr[-2000:], pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> KernelTests:
    """Let this folder's files choose when they are collected: pytest makes all, asks for some."""
    return KernelTests.from_parent(parent, path=module_path)
