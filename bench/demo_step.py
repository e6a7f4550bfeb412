"""Time of the demo's step in this checkout against another one's, in turns.

    python bench/demo_step.py OTHER [--narrow] [--rounds 5] [--save]

OTHER is a folder that holds another version of the package. Both train the recipe ``demo`` in
fresh processes, on all cores that torch takes, each by the words of its own copy of this file, and
each sets what it sets itself: the format, the way in which threads wait. ``--narrow`` hides wide
vectors and bfloat16 units from torch and oneDNN, as on a machine with AVX2 alone, and has both
compute in fp32. A round's figure is the median of its steps; the ratio is that of the rounds'
medians.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from moefold.training.machine import cpu_name

HERE = Path(__file__).parents[1]
RESULTS = HERE / "bench" / "results" / "demo_step.json"
NARROW = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
IN_FP32 = ("train.precision=fp32", "optim.arithmetic=float32")
WARM_UP = 3
CHILD = """
import json, sys, time
from pathlib import Path
import moefold
from moefold.training.trainer import Trainer
folder, steps, *overrides = sys.argv[1:]
times = []
cache = Path(folder).parent / "data"
with Trainer(moefold.load_run("demo", overrides), folder, cache=cache) as job:
    for _ in range(int(steps)):
        started = time.perf_counter()
        job.step()
        times.append(time.perf_counter() - started)
print(json.dumps(times))
"""


def main(words: Sequence[str]) -> int:
    """Run the rounds and print the medians and their ratio."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("other", type=Path, help="folder of the other checkout")
    asked.add_argument("--narrow", action="store_true", help="hide AVX512 and bfloat16 units")
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--steps", type=int, default=12, help="of a round, three of them warm up")
    asked.add_argument("--save", action="store_true", help=f"note the figures in {RESULTS.name}")
    given = asked.parse_args(words)
    trees = {"this": HERE, "other": given.other.resolve()}
    rounds: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(given.rounds):
            for name, tree in trees.items():
                folder = Path(scratch) / name / str(number)
                rounds[name].append(one_round(tree, folder, given.steps, given.narrow))
    seconds = {name: median(times) for name, times in rounds.items()}
    ratio = seconds["other"] / seconds["this"]
    ratios = [o / t for o, t in zip(rounds["other"], rounds["this"], strict=True)]
    print(
        f"{'narrow' if given.narrow else 'as it is'}: this {seconds['this']:.3f} s a step, other "
        f"{seconds['other']:.3f} s; {ratio:.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    if given.save:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        held["narrow" if given.narrow else "as it is"] = {
            "machine": f"{cpu_name()}, {os.cpu_count()} cores",
            "seconds": {name: [round(t, 4) for t in times] for name, times in rounds.items()},
            "ratio": round(ratio, 3),
        }
        RESULTS.write_text(json.dumps(held, indent=1) + "\n")
    return 0


def one_round(tree: Path, folder: Path, steps: int, narrow: bool) -> float:
    """Return the median seconds of a step of the demo, as the package in ``tree`` takes it.

    ``folder`` is new; data is prepared once, beside it.
    """
    words, bench = CHILD, tree / "bench" / Path(__file__).name
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    environment |= {"PYTHONPATH": str(tree)}
    if bench.exists():
        words = bench.read_text().partition('CHILD = """')[2].partition('"""')[0]
    else:
        environment["OMP_WAIT_POLICY"] = "passive"  # its command line sets it, its package not
    if narrow:
        environment |= NARROW
    done = subprocess.run(
        [sys.executable, "-c", words, str(folder), str(steps), *(IN_FP32 if narrow else ())],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return median(json.loads(done.stdout.splitlines()[-1])[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
