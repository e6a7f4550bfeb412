"""A rank without the others beside the same rank among real ones: exchanges and processor time.

    python bench/rank_alone.py [--steps N] [--store] [LAYOUT ...]

Runs a small model on eight real ranks in each layout, and then each of the eight on its own: the
bytes and calls of all exchanges by call site must be equal. Processor times are those of a step in
the process of a rank, on one thread, the fastest of N: user and system time, and user time alone,
as real ranks here send through sockets of the system, which no rank on its own has.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch

from moefold.comm.fork_server import fork_server
from moefold.comm.launch import launch
from moefold.comm.lone import lone_world
from moefold.config.slot import modules_to_preload
from moefold.planner.case import Case
from moefold.planner.hardware import cpu_device, device_by_name
from moefold.planner.task import task_from_run
from moefold.run import Run, load_run
from moefold.training.rank_step import RankStep, figures_of, step_among_ranks
from moefold.training.rank_task import linked, require_rank

STORED = Path(__file__).parent / "results" / "rank_alone.json"
WORLD = 8
LAYOUTS = ("pp4 ep2", "pp2 ep4")
MODEL = (
    "train.precision=fp32", "train.batch=4", "train.micro_batch=1", "data.seq=512",
    "model.shape.hidden=512", "model.shape.layers=4", "model.shape.expert_width=1024",
)  # fmt: skip


def case_of(sizes: str, changes: tuple[str, ...] = MODEL) -> tuple[Run, Case]:
    """Return a run of eight ranks and its step."""
    run = load_run("tiny", [f"layout.sizes={json.dumps(sizes)}", *changes])
    require_rank(run, 0, WORLD)
    cluster = linked(cpu_device(3e10, 1e10, 1 << 34), device_by_name("h100"), WORLD)
    task, layout = task_from_run(run, cluster, load=1.0)
    return run, task.case(layout)


def alone(run: Run, case: Case, rank: int, steps: int) -> dict[str, Any]:
    """Run steps of a rank without the others; return what ``step_among_ranks`` does of one."""
    torch.set_num_threads(1)
    with lone_world(case.folding, rank) as world:
        return figures_of(RankStep(world, run, case), steps)


def compared(sizes: str, steps: int) -> dict[str, Any]:
    """Return figures of a layout: bytes that differ, and processor times of all ranks."""
    run, case = case_of(sizes)
    fork_server("moefold.training.rank_step", *modules_to_preload((run, run.decoder)))
    real = launch(step_among_ranks, WORLD, run, case, steps)
    ours = [alone(run, case, rank, steps) for rank in range(WORLD)]
    differ = [rank for rank in range(WORLD) if real[rank]["totals"] != ours[rank]["totals"]]
    there = [_fastest(each, "user", "system") for each in real]
    here = [_fastest(each, "user", "system") for each in ours]
    ratios = [one / other for one, other in zip(here, there, strict=True)]
    of_user = [
        _fastest(one, "user") / _fastest(other, "user")
        for one, other in zip(ours, real, strict=True)
    ]
    sent = sum(total[-1] for each in ours for total in each["totals"])
    return {
        "layout": sizes, "steps": steps, "bytes": sent, "ranks_with_other_bytes": differ,
        "among_ranks_s": there, "alone_s": here, "ratios": ratios, "user_ratios": of_user,
        "median_ratio": statistics.median(ratios),
        "median_user_ratio": statistics.median(of_user),
    }  # fmt: skip


def _fastest(figures: dict[str, Any], *kinds: str) -> float:
    """Return the least seconds of a step, of these kinds together."""
    return min(map(sum, zip(*(figures[kind] for kind in kinds), strict=True)))


def main() -> None:
    """Compare the layouts that the command line names."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--store", action="store_true", help=f"write {STORED.name}")
    asked = parser.parse_args()
    rows = list[dict[str, Any]]()
    for sizes in asked.layouts:
        rows.append(compared(sizes, asked.steps))
        row = rows[-1]
        low, high = min(row["ratios"]), max(row["ratios"])
        print(
            f"{sizes}: {row['bytes']:,} bytes, ranks that differ: {row['ranks_with_other_bytes']}; "
            f"processor time alone / among ranks {row['median_ratio']:.3f} ({low:.3f}-{high:.3f}), "
            f"user time alone {row['median_user_ratio']:.3f}; "
            f"{statistics.median(row['among_ranks_s']):.3f} s"
        )
    if asked.store:
        STORED.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
