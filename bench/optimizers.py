"""Muon beside AdamW on the demo, at equal time: bits per byte on the held-out files.

Each run gets the same processor time for its steps, as many as fit; AdamW is given several learning
rates and its best one is compared. The demo's own settings are Muon's. Runs one after another, on
one thread, several minutes each.

    python bench/optimizers.py --seconds 150 --save
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch

from moefold.run import load_run
from moefold.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"


def adamw(lr: float) -> list[str]:
    """Return the overrides that put AdamW in Muon's place."""
    return [f"optim={{kind: adamw, lr: {lr}, schedule_lr: {{kind: wsd, warmup: 20}}}}"]


def step_seconds(overrides: list[str], cache: Path, steps: int = 12) -> float:
    """Return the median processor time of a step, warm-up left out."""
    run = load_run("demo", overrides)
    taken = []
    with tempfile.TemporaryDirectory() as folder, Trainer(run, folder, cache=cache) as job:
        for _ in range(steps):
            started = time.process_time()
            job.step()
            taken.append(time.process_time() - started)
    return sorted(taken[2:])[len(taken[2:]) // 2]


def train(overrides: list[str], steps: int, cache: Path) -> float:
    """Train so many steps, with the schedule fitted to them; return held-out bits per byte."""
    run = load_run("demo", [*overrides, f"train.steps={steps}"])
    with tempfile.TemporaryDirectory() as folder, Trainer(run, folder, cache=cache) as job:
        while job.step_number < job.last_step:
            job.step()
        return job.evaluate(tokens=10**9)["val/python_stdlib/bits_per_byte"]


def main() -> None:
    """Train and print one line each."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seconds", type=float, default=150.0, help="processor time of the steps")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.006, 0.012])
    parser.add_argument("--save", action="store_true", help="write bench/results/optimizers.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        # Muon is the recipe as it is.
        runs = {"muon": list[str]()} | {f"adamw {lr}": adamw(lr) for lr in args.rates}
        for name, overrides in runs.items():
            seconds = step_seconds(overrides, Path(scratch))
            steps = int(args.seconds / seconds)
            bits = train(overrides, steps, Path(scratch))
            found.append({"run": name, "steps": steps, "step_s": seconds, "bits_per_byte": bits})
            print(
                f"{name:14} {seconds:.3f} s a step, {steps} steps: {bits:.3f} bits per byte",
                flush=True,
            )
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        report = {"seconds": args.seconds, "torch": torch.__version__, "found": found}
        (RESULTS / "optimizers.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
