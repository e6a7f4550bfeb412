"""Plants bugs in a copy of the project and shows that tests fail: ``python -m tests.plants``.

Words after it choose plants: part of what a plant says, of its test or of its file. Each test is
run once without a bug, where it must pass, and once with each bug, where it must fail.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.plants.plant import Plant
from tests.plants.table import PLANTS

ROOT = Path(__file__).parents[2]
COPIED = ("moefold", "tests", "bench", "docs", "pyproject.toml")
FAILED = 1
"""pytest's exit status where tests ran and failed; code that cannot be imported shows nothing."""
SECONDS = 300


def copy_project(folder: Path) -> None:
    """Copy what tests need, without what earlier runs left behind."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    # Byte code that is used while its source's hash is the same: a plant and its removal may fall
    # into one second of a file's time.
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*command, *COPIED[:-1]], cwd=folder, check=True)


def run_test(folder: Path, test: str) -> tuple[int, str]:
    """Run a test in a copy; returns pytest's exit status and why it failed, in a line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return -1, f"took more than {SECONDS} s"
    lines = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    return done.returncode, next((line for line in lines if line not in ("", "AssertionError")), "")


def try_plant(folder: Path, plant: Plant) -> tuple[bool, str]:
    """Plant one bug, run its test, take the bug out; returns whether it was noticed, and how."""
    file = folder / plant.path
    sound = file.read_text("utf-8")
    try:
        file.write_text(plant.into(sound), "utf-8")
        status, why = run_test(folder, plant.test)
    except ValueError as error:
        return False, str(error)
    finally:
        file.write_text(sound, "utf-8")
    return status == FAILED, why if status == FAILED else f"pytest's exit status is {status}. {why}"


def chosen(words: Sequence[str]) -> list[Plant]:
    """Return the plants that any of the words names; all without words."""
    said = [(p, f"{p.said} {p.test} {p.file}") for p in PLANTS]
    return [plant for plant, text in said if not words or any(w in text for w in words)]


def main(arguments: Sequence[str]) -> int:
    """Try plants, as many beside each other as there are cores, and print a table.

    Returns how many went unnoticed.
    """
    parser = argparse.ArgumentParser("python -m tests.plants", description=__doc__)
    parser.add_argument("words", nargs="*", help="what chooses plants; without words all are tried")
    plants, missed = chosen(parser.parse_args(arguments).words), list[str]()
    if not plants:
        parser.error(f"no plant is named by {' or '.join(arguments)}; try a word, such as padding")
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="plants-") as name, ThreadPoolExecutor(cores) as pool:
        free = SimpleQueue[Path]()
        for number in range(cores):
            copy_project(Path(name, str(number)))
            free.put(Path(name, str(number)))

        def in_copy(call: Callable[[Path], tuple[Any, str]]) -> tuple[Any, str]:
            folder = free.get()
            try:
                return call(folder)
            finally:
                free.put(folder)

        tests = list(dict.fromkeys(plant.test for plant in plants))
        calls = [partial(run_test, test=test) for test in tests]
        for test, (status, why) in zip(tests, pool.map(in_copy, calls), strict=True):
            if status != 0:
                missed.append(test)
                print(f"FAILS WITHOUT A BUG  {test}\n    {why}", flush=True)
        tries = [partial(try_plant, plant=plant) for plant in plants]
        for plant, (noticed, why) in zip(plants, pool.map(in_copy, tries), strict=True):
            if not noticed:
                missed.append(plant.said)
            word = "noticed " if noticed else "UNNOTICED"
            print(f"{word} {plant.said}", flush=True)
            print(
                f"         {plant.path}, {plant.test.partition('::')[2]}: {why[:120]}", flush=True
            )
    print(f"{len(plants)} plants, {len(missed)} problems")
    return len(missed)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
