"""The demo with steps that are made again ends as the one without, to the bit.

    python bench/second_tries.py [train.batch=4 ...] [--steps 300] [--share 0.05]
        [--zero 0 1 2 3] [--precision fp32] [--rows 4096] [--recipe demo] [--save]

Trains a recipe twice on two ranks of ep2 with room for all rows, once as it is and once with a flag
of missing room on a drawn rank in a drawn share of the steps, and compares the last checkpoints.
Nothing is evaluated meanwhile. With fewer ``--rows`` a second try takes several rounds, whose sums
are rounded in another order: fp64 then says how far apart the runs end.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch

from moefold.checkpoint.load import Reader
from moefold.training.run_folder import History

RESULTS = Path(__file__).parent / "results" / "second_tries.json"
QUIET = [f"watch.{name}=null" for name in ("evaluate", "sample", "plots", "experts_page")]
FLAGS = """
from random import Random

import torch

from moefold.parallel import limits

REAL, DRAW, FIRST = limits.missing_room, Random({seed}), []


def missing(parts, overflow):
    found = REAL(parts, overflow)
    if overflow:
        flagged, rank = DRAW.random() < {share}, DRAW.randrange(2)
        if flagged and rank == parts.world.rank:
            return torch.full_like(found, 3)
    return found


limits.missing_room = missing
"""
"""All ranks draw alike; the exact step, whose dispatch has no room to lack, draws nothing."""


def main(words: list[str]) -> int:
    """Train the pairs of runs; returns 1 where any differ by more than their format's bound."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=300)
    asked.add_argument("--share", type=float, default=0.05)
    asked.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3])
    asked.add_argument("--precision", nargs="+", default=["fp32"])
    asked.add_argument("--rows", type=int, default=4096)
    asked.add_argument("--recipe", default="demo")
    asked.add_argument("--save", action="store_true", help="write bench/results/second_tries.json")
    given, more = asked.parse_known_args(words)
    failed, rows = False, list[dict[str, object]]()
    for precision in given.precision:
        for zero in given.zero:
            about = [
                "layout.sizes=ep2",
                f"layout.zero={zero}",
                f"layout.dispatch={{kind: padded, max_rows: {given.rows}}}",
                f"train.steps={given.steps}",
                f"train.precision={precision}",
                *QUIET,
                *more,
            ]
            with TemporaryDirectory() as folder:
                plain, again = (Path(folder, name) for name in ("plain", "again"))
                trained(given.recipe, plain, 0.0, about)
                number = trained(given.recipe, again, given.share, about)
                apart = difference(plain, again)
            bound = 1e-10 if precision == "fp64" else 0.0
            failed |= apart > bound or not number
            said = {"steps": given.steps, "made_again": number, "apart": apart, "with": more}
            rows.append({"precision": precision, "zero": zero} | said)
            print(json.dumps(rows[-1]), flush=True)
    if given.save:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def trained(recipe: str, folder: Path, share: float, about: list[str]) -> int:
    """Train a run; return how many of its steps were made again."""
    plugin = folder.with_suffix(".py")
    plugin.write_text(FLAGS.format(seed=1, share=share), "utf-8")
    command = [sys.executable, "-m", "moefold", "train", recipe, *about, f"uses=[{plugin}]"]
    command += ["watch.progress.style=off", "--nproc", "2", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    steps = History.read(folder).lines
    return sum(bool(step.get("needed_rows")) for step in steps)


def difference(one: Path, other: Path) -> float:
    """Return by how much tensors of the last checkpoints differ, over the largest of each."""
    first, second = (max(folder.rglob("step-????????")) for folder in (one, other))
    most = 0.0
    with Reader(first) as left, Reader(second) as right:
        if left.manifest.tensors.keys() != right.manifest.tensors.keys():
            raise RuntimeError(f"{first} and {second} hold other tensors")
        for name in left.manifest.tensors:
            a, b = left.read(name), right.read(name)
            if not torch.equal(a, b):
                a, b = a.double(), b.double()
                most = max(most, float((a - b).abs().max() / a.abs().max()))
    return most


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
