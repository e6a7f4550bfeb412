"""Memory that is used up, and ranks that are lost, are told in one sentence and by a status."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli import main as cli
from moefold.failures import (
    Failure,
    OutOfMemory,
    describe_host_memory,
    describe_shortage,
    is_out_of_memory,
    require_address_space,
)
from tests.pure.test_cli_main import fails

__all__ = ["fails"]
ROOT = Path(__file__).parents[2]

USED_UP = [
    MemoryError(),
    MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8388608 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", USED_UP, ids=lambda error: f"{type(error).__name__} {error}"[:40])
def test_used_up_memory_is_one_sentence(error: Exception, fails, capsys) -> None:
    assert is_out_of_memory(error)
    assert fails(error) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no memory left: an allocation")
    assert "this process has" in said and "data.seq" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a bug"), OutOfMemory("told already"), KeyError("memory"), OSError(2, "")],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_sizes_are_named() -> None:
    assert "an allocation of 7.45 GiB failed" in describe_shortage(USED_UP[1])
    assert "an allocation of 8388608 bytes failed" in describe_shortage(USED_UP[2])
    assert "of the machine's" in describe_host_memory()


class Lost(Failure):
    """Some failure with a status."""

    status = 99


def test_a_failure_is_told_with_its_status(fails, capsys) -> None:
    assert fails(Lost("rank 1 was killed")) == 99
    assert capsys.readouterr().err.startswith("error: rank 1 was killed\n")
    with pytest.raises(Lost):
        fails(Lost("rank 1 was killed"), "--traceback")


def test_memory_that_does_not_suffice_to_print_with(fails, capfd, monkeypatch) -> None:
    def refuse(error: Exception) -> None:
        raise MemoryError

    monkeypatch.setattr(cli, "_print_error", refuse)
    assert fails(MemoryError()) == 2
    assert capfd.readouterr().err.startswith("error: no memory left: an allocation failed")


@pytest.mark.parametrize(
    "mebibytes, said",
    [
        (400, "the smallest run takes 1.00 GiB more; this process has"),
        (100, "moefold train takes 0.15 GiB more; this process has"),
    ],
)
def test_a_limit_of_memory_is_met_before_libraries_are_imported(
    mebibytes: int, said: str, tmp_path: Path
) -> None:
    limit = mebibytes * 2**20
    ended = subprocess.run(
        [sys.executable, "-m", "moefold", "train", "tiny", "--folder", tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert f"no memory left: {said}" in ended.stderr
    assert f"may map {mebibytes / 1024:.2f} GiB (ulimit -v)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_limit_nothing_is_asked() -> None:
    require_address_space(2**62, "nothing")
