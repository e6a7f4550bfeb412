"""What copies of the state in memory cost a step: steps with one and without take turns.

    python bench/copy_overhead.py tiny
    python bench/copy_overhead.py demo --ranks 2 --steps 60

One run with ``watch.survive={every: 2}``; the ratio is that of the medians of both kinds of steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from moefold.comm.config import Survive
from moefold.comm.elastic import launch_elastic
from moefold.comm.environment import RankInfo
from moefold.comm.worker import Attempt
from moefold.run import Run, load_run
from moefold.training.distributed import open_world
from moefold.training.recover import MemoryCheckpoint, packed_size
from moefold.training.trainer import Trainer

RECORD = Survive(every=2)
FIRST = 4
"""Steps before the first that counts."""


def timed(info: RankInfo, attempt: Attempt, run: Run, folder: Path, steps: int) -> dict[str, float]:
    """Train; return the seconds of steps with and without a copy, and a copy's bytes."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    memory = MemoryCheckpoint(attempt, RECORD)
    with (
        open_world(run, info, folder) as world,
        Trainer(run, folder, world=world, memory=memory) as job,
    ):
        for step in range(1, FIRST + steps + 1):
            started = time.perf_counter()
            job.step()
            if step > FIRST:
                seconds[step % RECORD.every].append(time.perf_counter() - started)
        size = packed_size(
            [
                held.tensor
                for held in (*job.state.weights(), *job.state.optimizer_state(job.optimizer))
            ]
        )
    without, copied = statistics.median(seconds[1]), statistics.median(seconds[0])
    return {"without_s": without, "with_s": copied, "ratio": copied / without, "bytes": size}


def main() -> None:
    """Carry out the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    changes = ["watch.evaluate=null", "watch.progress.style=off", "train.precision=fp32"]
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        given = load_run(args.run, changes), Path(folder) / "out", args.steps
        found = launch_elastic(timed, args.ranks, *given, record=RECORD)
    print(json.dumps({"run": args.run, "ranks": args.ranks, **found}, indent=1))


if __name__ == "__main__":
    main()
