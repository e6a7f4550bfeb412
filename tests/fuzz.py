"""Mutated inputs of every kind: a message and a status, never a traceback, a hang or gigabytes.

``python -m tests.fuzz [--tries N] [--seed S]`` (``make fuzz``) draws a seed, prints it, and tries N
inputs in one process; only after a crash, or a hang that no signal interrupts, the rest is tried in
another. A failure is printed with its kind, number and seed, which make the same input again.
"""

import argparse
import json
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tests.fuzz_inputs import CANARY, KINDS

SECONDS, GIGABYTE = 5.0, 1 << 20
"""Bounds of an input: processor time, and growth of the process's memory in KiB."""
ENDED = 120
"""Seconds after which a worker that no signal reaches is ended."""


class Failure(NamedTuple):
    """An input that was not answered as it should be."""

    kind: str
    number: int
    what: str


class Outcome(NamedTuple):
    """What became of an input."""

    parses: bool
    """Whether its format could be read, so that what is in it came under scrutiny."""
    failure: Failure | None


class Hang(BaseException):
    """An input took more than its time; no code catches this by accident."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` after so many seconds of processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attempt(kind: str, number: int, seed: int) -> Outcome:
    """Try one input in a folder of its own."""
    draw = random.Random(f"{seed} {kind} {number}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out, err, home = StringIO(), StringIO(), Path.cwd()
    problem = ""
    parses = False
    with tempfile.TemporaryDirectory(prefix="moefold-fuzz-") as folder:
        os.chdir(folder)
        try:
            with redirect_stdout(out), redirect_stderr(err), limited(SECONDS):
                made = KINDS[kind](draw, Path(folder))
                parses = made.parses
                made.use()
        except (ValueError, OSError):
            pass
        except Hang:
            problem = f"hang: more than {SECONDS} s\n" + traceback.format_exc(limit=-6)
        except BaseException:
            problem = traceback.format_exc(limit=-8)
        finally:
            os.chdir(home)
        if Path(folder, CANARY).exists() or (home / CANARY).exists():
            problem = "something in the input was executed"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > GIGABYTE:
        problem = problem or f"{grown / GIGABYTE:.1f} GiB"
    if "Traceback" in err.getvalue():
        problem = problem or err.getvalue()
    return Outcome(parses, Failure(kind, number, problem) if problem else None)


def attempts(tries: int) -> list[tuple[str, int]]:
    """Return kind and number of each input, the kinds in turn."""
    names = list(KINDS)
    return [(names[i % len(names)], i // len(names)) for i in range(tries)]


def work(seed: int, tries: int, first: int, notes: Path) -> None:
    """Try inputs from ``first`` on; note each before it is tried, and its failure."""
    with notes.open("a") as file:
        for at, (kind, number) in list(enumerate(attempts(tries)))[first:]:
            file.write(json.dumps({"at": at}) + "\n")
            file.flush()
            signal.alarm(ENDED)  # ends the process where no exception can be raised
            parses, failure = attempt(kind, number, seed)
            signal.alarm(0)
            if parses:
                file.write(json.dumps({"parses": kind}) + "\n")
            if failure is not None:
                file.write(json.dumps({"failed": failure}) + "\n")
            file.flush()


def run(seed: int, tries: int) -> tuple[list[Failure], Counter[str]]:
    """Try all inputs in a process, and in another after each crash.

    Returns:
        The failures, and how many inputs of each kind could be read.
    """
    failures: list[Failure] = []
    readable = Counter[str]()
    planned = attempts(tries)
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        while first < tries:
            notes.write_text("")
            words = ["--seed", str(seed), "--tries", str(tries), "--from", str(first)]
            status = subprocess.run([sys.executable, "-m", "tests.fuzz", *words, "--notes", notes])
            lines = [json.loads(line) for line in notes.read_text().splitlines()]
            failures += [Failure(*line["failed"]) for line in lines if "failed" in line]
            readable.update(line["parses"] for line in lines if "parses" in line)
            reached = max((line["at"] for line in lines if "at" in line), default=first)
            first = reached + 1
            if status.returncode:
                what = f"the process ended with status {status.returncode}"
                failures.append(Failure(*planned[reached], what))
    return failures, readable


def cli() -> int:
    """Run the command line; the exit status is 1 if an input failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--only", metavar="KIND:NUMBER", help="try one input, with its traceback")
    parser.add_argument("--from", dest="first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.notes is not None:
        work(args.seed, args.tries, args.first, args.notes)
        return 0
    if args.only:
        kind, _, number = args.only.partition(":")
        _, failure = attempt(kind, int(number), args.seed)
        print(failure.what if failure else "answered as it should be")
        return int(failure is not None)
    print(f"seed {args.seed}, {args.tries} inputs of {len(KINDS)} kinds", flush=True)
    started = time.monotonic()
    failures, readable = run(args.seed, args.tries)
    for failure in failures:
        print(f"\n{failure.kind}:{failure.number}  (--seed {args.seed})\n{failure.what}")
    tried = Counter(kind for kind, _ in attempts(args.tries))
    shares = ", ".join(f"{kind} {readable[kind] / tried[kind]:.0%}" for kind in tried)
    print(f"in a form that can be read: {readable.total() / args.tries:.0%} ({shares})")
    print(f"{len(failures)} failed, {time.monotonic() - started:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(cli())
