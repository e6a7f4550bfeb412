"""Gives each process of kernel tests one Triton: the interpreter, or the compiler.

Which one is chosen when Triton is imported. So a file's tests run here where the process is still
free or has chosen likewise; else all files of one choice are one test, which runs another process.
``test_code_*`` files are compiled, all others interpreted, unless KERNEL_TESTS_ON names a device.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

MODE = "TRITON_INTERPRET"
APART = "KERNEL_TESTS_APART"
"""Set in such a process."""
SECONDS = 560
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
        mode = "0" if on_device or self.path.name.startswith("test_code_") else "1"
        if choose(mode):
            return super().collect()
        if APART in os.environ:
            raise self.CollectError("a fresh process has chosen its Triton before this file")
        return [WholeFiles.from_parent(self, name="all", mode=mode)]


class WholeFiles(pytest.Item):
    """Passes where all tests of its files do."""

    def __init__(self, mode: str, **node: Any) -> None:
        super().__init__(**node)
        self.mode, self.files = mode, [str(self.path)]
        self.add_marker("slow")

    def runtest(self) -> None:
        """Run pytest on the files."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.files]
        env = os.environ | {APART: "1"}
        told = {"env": env, "capture_output": True, "text": True, "timeout": SECONDS}
        done = subprocess.run(command, **told)
        if done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            pytest.fail(done.stdout[-8000:] + done.stderr[-2000:], pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> KernelTests:
    """Let this folder's files choose when they are collected: pytest makes all, asks for some."""
    return KernelTests.from_parent(parent, path=module_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let whole files of one choice share a process: its start takes longer than most files."""
    first: dict[str, WholeFiles] = {}
    for item in [item for item in items if isinstance(item, WholeFiles)]:
        leads = first.setdefault(item.mode, item)
        if leads is not item:
            leads.files += item.files
            items.remove(item)


@pytest.fixture(autouse=True)
def operations_on_the_device() -> Iterator[None]:
    """Run own kernels where KERNEL_TESTS_ON says, those too that a test does not watch."""
    where = os.environ.get("KERNEL_TESTS_ON")
    if not where:
        yield
        return
    from tests.triton.values import on_device

    with on_device(where):
        yield
