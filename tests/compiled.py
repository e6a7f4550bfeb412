"""Workers of one run share what would be compiled by each: the package, and tests with asserts.

In a new checkout no file is compiled. Workers import the same files in the same order, so that each
would compile nearly all of them, which takes as long as to collect all tests.
"""

import compileall
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]


def compile_share(config: pytest.Config) -> None:
    """Compile every n-th file, from the worker's own number on, if this process is a worker.

    Nobody waits for the others' files: whoever comes to one too soon compiles it too.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    first = int(worker["workerid"].removeprefix("gw"))
    files = [file for part in ("moefold", "bench", "tests") for file in (ROOT / part).rglob("*.py")]
    for file in sorted(files)[first :: worker["workercount"]]:
        if file.name.startswith("test_") or file.name == "conftest.py":
            _rewrite(file, config)
        else:
            compileall.compile_file(file, quiet=2)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """Do what pytest does when it imports a file of tests."""
    folder = rewrite.get_cache_dir(file)
    compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
