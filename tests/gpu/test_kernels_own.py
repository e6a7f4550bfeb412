"""Own kernels on a device: the values that ``tests/triton`` holds their interpreted forms to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "triton"
FILES = ("cross_entropy", "grouped", "lookup", "norm", "permute", "routing", "swiglu")
APART = "not knows and not 64_bits and not view"
"""Tests of what torch knows of an operation, and of the interpreter's watch, move nothing."""


@pytest.mark.real_device
@pytest.mark.parametrize("name", FILES)
def test_values_on_the_device_are_those_of_fp64(name: str) -> None:
    done = run_on("cuda", name)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def run_on(device: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a file of kernel tests whose operations run on a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", APART]
    env = os.environ | {"KERNEL_TESTS_ON": device}
    file = str(FOLDER / f"test_{name}.py")
    return subprocess.run([*command, file], env=env, capture_output=True, text=True)
