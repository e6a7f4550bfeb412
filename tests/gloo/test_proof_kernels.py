"""Layouts are the plain reference where every rank's rows go through own kernels, interpreted."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gloo.harness import one_at_a_time

ROOT = Path(__file__).parents[2]
SECONDS = 480


@pytest.mark.slow
def test_layouts_through_own_kernels_stay_within_their_rounding() -> None:
    """In a process of its own: the server that its ranks fork from has chosen the interpreter."""
    if find_spec("triton") is None:
        pytest.skip("kernels need Triton to be interpreted")
    command = [sys.executable, "bench/proof_kernels.py", "few"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = {"env": env, "cwd": ROOT, "capture_output": True, "text": True, "timeout": SECONDS}
    with one_at_a_time():
        done = subprocess.run(command, **told)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 of 2 in " in done.stdout
