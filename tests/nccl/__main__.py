"""Runs every trial under NCCL's rules and prints what it found: ``python -m tests.nccl``."""

import sys
import tempfile
import time

from tests.nccl.rules import Hang
from tests.nccl.trials import Trial, layouts, others, save, schedules, tried


def main(words: list[str]) -> int:
    """Print a line for each trial, or for those whose name has all ``words``; 1 if one hangs."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Trial("pp3 checkpoint", 3, save, ("pp3", f"{folder}/run"), "meta")
        trials = [*others(), saved, *schedules(), *layouts()]
        hung = 0
        print(f"{'trial':44} {'ranks':>5} {'communicators':>13} {'seconds':>7}")
        for trial in (each for each in trials if all(word in each.name for word in words)):
            started, said = time.perf_counter(), ""
            try:
                most = max(len(made) for made in tried(trial).made.values())
            except Hang as error:
                hung, most, said = hung + 1, 0, f"\n{error}"
            took = time.perf_counter() - started
            state = "hangs" if said else "ok"
            print(
                f"{trial.name:44} {trial.ranks:5} {most:13} {took:7.1f} {state}{said}", flush=True
            )
    return int(hung > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
