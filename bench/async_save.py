"""What a checkpoint behind the steps costs them, against a plain copy of the state in memory.

    python bench/async_save.py [--folder WHERE] [--trials 5] [--out bench/results/async_save.json]

One rank trains a mixture of experts with AdamW on one thread. *stall* is how long ``save`` keeps
the step from going on, with all that is asked in the steps until the checkpoint is published;
*copy* is one copy of the same state into memory that is there already. *slower* compares steps
while a thread writes with steps of the same trial while none does: the median of each, and the
fastest of each, since a busy machine only ever adds. The memory for the copies is taken before the
first step. On two cores that nobody else uses, one is free.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.verify import verify
from moefold.comm.world import World
from moefold.data.batch import MicroBatch, pack
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.model.init import initial_values
from moefold.moe.config import Moe, Router
from moefold.optim.base import Optimizer
from moefold.optim.config import AdamW
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.training.saving import Saver
from moefold.training.state import assigned_state
from moefold.training.step import gradients

ROWS, MICRO_BATCHES = 128, 4
STEPS = 6
"""Steps of a trial before its save."""


def decoder(layers: int, hidden: int) -> Decoder:
    """Return a small mixture of experts."""
    ffn = Moe(width=2 * hidden, router=Router(experts=16, top_k=2), balance=())
    block = Block(attention=Gqa(heads=4, kv_heads=2, head_dim=hidden // 4), ffn=ffn)
    return Decoder(vocab=4096, hidden=hidden, stacks=(Stack(repeat=layers, blocks=(block,)),))


class Bench:
    """A model that trains, and saves behind its steps."""

    def __init__(self, folder: Path, layers: int, hidden: int) -> None:
        world, described = World.single(), decoder(layers, hidden)
        self.data = ShardedState(build_parts(described, "fp32", Layout(), world, "meta"))
        self.data.fill(initial_values(described, 1))
        self.optimizer: Optimizer = self.data.optimizer(AdamW())
        draws = torch.Generator().manual_seed(1)
        self.batches: Sequence[MicroBatch] = [
            pack([torch.randint(0, 4096, (ROWS,), generator=draws).tolist()])
            for _ in range(MICRO_BATCHES)
        ]
        self.lock = FolderLock(folder, "bench")
        self.saver = Saver(folder, CheckpointPolicy(asynchronous=True, keep=1), self.lock, world)
        self.saver.allocate_copies(lambda: assigned_state(self.data, self.optimizer))
        self.number = 0

    def step(self) -> tuple[float, float]:
        """Make a step; return the seconds of its work, and of asking how the save is."""
        started = time.perf_counter()
        self.saver.poll()
        asked = time.perf_counter()
        gradients(self.data, self.batches, ROWS)
        self.optimizer.step()
        return time.perf_counter() - asked, asked - started

    def copy(self) -> float:
        """Return the seconds of one copy of the state into memory that is there."""
        state = assigned_state(self.data, self.optimizer)
        parts = [part.tensor for slices in state.values() for part in slices]
        into = [torch.zeros_like(tensor) for tensor in parts]
        started = time.perf_counter()
        for mine, tensor in zip(into, parts, strict=True):
            mine.copy_(tensor)
        return time.perf_counter() - started

    def trial(self) -> dict[str, Any]:
        """Make steps, save, and make steps until the checkpoint is there."""
        copied = statistics.median(self.copy() for _ in range(5))
        quiet = [self.step()[0] for _ in range(STEPS)]
        self.number += 1
        started = time.perf_counter()
        self.saver.save(self.number, assigned_state(self.data, self.optimizer), {})
        stall = time.perf_counter() - started
        begun, beside = time.perf_counter(), []
        while self.saver._saving is not None:
            worked, asked = self.step()
            stall += asked
            beside.append(worked)
        return {
            "copy_s": copied,
            "stall_s": stall,
            "write_s": time.perf_counter() - begun,
            "quiet_s": quiet,
            # the last of them began while nothing was written any more
            "beside_s": beside[:-1] or beside,
        }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a new folder)")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--out", type=Path, default=Path("bench/results/async_save.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        bench = Bench(Path(name), args.layers, args.hidden)
        bench.step()
        with bench.lock:
            rows = [bench.trial() for _ in range(args.trials)]
            assert verify(Path(name) / f"step-{bench.number:08d}") == []
    state = assigned_state(bench.data, bench.optimizer)
    size = sum(p.tensor.nbytes for held in state.values() for p in held)
    answer = summary(rows, size)
    args.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps({key: value for key, value in answer.items() if key != "trials"}, indent=1))


def summary(rows: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Return the figures of all trials."""
    stalls = [row["stall_s"] / row["copy_s"] for row in rows]
    quiet, beside = ([s for row in rows for s in row[key]] for key in ("quiet_s", "beside_s"))
    return {
        "state_bytes": size,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "copy_s": min(row["copy_s"] for row in rows),
        "stall_over_copy_best": min(stalls),
        "stall_over_copy_median": statistics.median(stalls),
        "stall_over_copy_of_the_first": stalls[0],
        "slower_median": statistics.median(beside) / statistics.median(quiet) - 1,
        "slower_best": min(beside) / min(quiet) - 1,
        "trials": rows,
    }


if __name__ == "__main__":
    main()
