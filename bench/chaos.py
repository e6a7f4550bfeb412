"""Eight ranks in a folded five-dimensional layout, and a fault at least every 30 seconds.

First the run under fire: ranks are killed and stopped, alone and in pairs, checkpoints torn, disks
filled, ranks held up. Then the same number of steps in peace. Every loss must be the same to the
last bit, and every step have seen the same tokens. Exit status 1 where a mark is missed.

    python bench/chaos.py --minutes 2 --ranks 4
    python bench/chaos.py --save
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.folder import candidates
from moefold.comm.config import Survive
from moefold.comm.respawn import survive
from moefold.data.prepare import prepare
from moefold.run import Run, load_run
from moefold.training import faults
from moefold.training.history import History

RESULTS = Path(__file__).parent / "results" / "chaos.json"
LAYOUTS = {8: "tp2 cp2 pp2 ep2 etp2", 4: "tp2 pp2 ep2"}
KINDS = ("kill", "stop", "pair", "torn", "full", "slow", "kill")
EVERY_S, SETTLE_S = 27.0, 12.0
RECORD = Survive(limit=10_000, stopped_s=0.5)
MARKS = {
    "detect_s": ("most", 2.0),
    "back_s": ("median", 5.0),
    "steps_lost": ("most", 1),
    "throughput_kept": ("least", 0.85),
}
TIMES = ("tokens_per_s", "mfu", "step_time_s")


def run_of(ranks: int, steps: int) -> Run:
    """Return the tiny recipe in fp64, in the layout for so many ranks."""
    changes = {
        "train.precision": "fp64",
        "train.steps": steps,
        "layout.sizes": json.dumps(LAYOUTS[ranks]),
        "watch.evaluate": "null",
        "watch.health": "null",
        "watch.pace": "null",
        "watch.time_out_s": 60,
        "watch.progress.style": '"off"',
        "watch.checkpoint": "{every: 10, keep: 2}",
    }
    return load_run("tiny", [f"{key}={value}" for key, value in changes.items()])


class Injector(threading.Thread):
    """Makes one fault after another until its time is up, then asks the run to end."""

    def __init__(self, folder: Path, notes: Path, ranks: int, seconds: float, seed: int) -> None:
        """Prepare; ``start`` begins to count once the run is under way."""
        super().__init__(daemon=True)
        self.folder, self.notes, self.ranks, self.seconds = folder, notes, ranks, seconds
        self.draws = random.Random(seed)
        self.made: list[dict[str, Any]] = []
        self.began = 0.0

    def run(self) -> None:
        """Wait for the first steps, then make faults at even times."""
        faults.wait_for(self.folder, 12, 600)
        self.began = time.time()
        end = self.began + self.seconds
        while time.time() + EVERY_S < end:
            due = time.time() + EVERY_S
            kind = KINDS[len(self.made) % len(KINDS)]
            ranks = self.draws.sample(range(self.ranks), 2)
            made = {"kind": kind, "ranks": ranks[: 1 + (kind == "pair")]}
            made |= {"at": time.time(), "step": faults.steps_in(self.folder)}
            self.made.append(made)
            self._make(kind, ranks)
            time.sleep(max(0.0, due - time.time()))
        time.sleep(max(0.0, end - time.time()))
        os.kill(os.getpid(), signal.SIGTERM)

    def _make(self, kind: str, ranks: list[int]) -> None:
        """Make a fault; two ranks that keep each other's copies are never lost together."""
        first, second = ranks
        if (first - second) % self.ranks == self.ranks // 2:
            second = (second + 1) % self.ranks
        pid = faults.pid_of(self.notes, first)
        if kind == "kill":
            faults.kill(pid)
        elif kind == "stop":
            faults.stop(pid)
        elif kind == "pair":
            self.made[-1]["ranks"] = [first, second]
            faults.kill(pid)
            faults.kill(faults.pid_of(self.notes, second))
        elif kind == "torn":
            self.made[-1]["file"] = str(faults.tear(self.folder, self.draws))
            faults.kill(pid)
        elif kind == "full":
            self.made[-1]["ranks"] = [first or 1]
            with faults.full_disk(faults.pid_of(self.notes, first or 1)):
                time.sleep(EVERY_S - SETTLE_S)
        elif kind == "slow":
            for _ in range(5):
                faults.slow(pid, 0.2)
                time.sleep(0.3)


def trained(folder: Path, ranks: int, steps: int, injector: Injector | None = None) -> History:
    """Train in a folder; return what the run wrote."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    if injector is not None:
        injector.start()
    run = run_of(ranks, steps)
    prepare(run.data, folder / ".prepared")
    survive(faults.rank, ranks, run, folder / "out", notes, record=RECORD, time_out_s=60.0)
    return History.read(folder / "out")


def measured(history: History, made: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """Return the figures of a run under fire, each fault's beside it."""
    starts = [event for event in history.events if "recovered" in event]
    parts = {"detect_s": 0.0, "restart_s": 0.0, "load_s": 0.0, "lost_s": 0.0}
    for start in starts:
        lived = start["recovered"]
        before = [fault for fault in made if fault["at"] <= lived["noticed"]]
        fault = before[-1]
        figures = {
            "detect_s": lived["noticed"] - fault["at"],
            "restart_s": lived["restart_s"],
            "load_s": lived["load_s"],
            "lost_s": max(lived["under_way_s"] - (lived["noticed"] - fault["at"]), 0.0),
            "back_s": start["time"] - fault["at"],
            # The step under way, or the one just done whose copies were under way.
            "steps_lost": max(1, lived["reached"] - start["step"]),
            "why": lived["why"],
        }
        fault.setdefault("recoveries", []).append(figures)
        for part in parts:
            parts[part] += figures[part]
    wall = history.events[-1]["time"] - began
    each = [figures for fault in made for figures in fault.get("recoveries", [])]
    return {
        "faults": len(made),
        "recoveries": len(each),
        "wall_s": wall,
        "parts_s": parts,
        "detect_s": max(figures["detect_s"] for figures in each),
        "back_s": statistics.median(figures["back_s"] for figures in each),
        "back_most_s": max(figures["back_s"] for figures in each),
        "steps_lost": max(figures["steps_lost"] for figures in each),
        "goodput": 1 - sum(parts.values()) / wall,
    }


def same(ours: History, theirs: History, folder: Path, peace: Path) -> dict[str, Any]:
    """Compare the figures of each step, and the tokens that each rank was given for it."""
    one, other = (
        [{k: v for k, v in line.items() if k not in TIMES} for line in history.lines]
        for history in (ours, theirs)
    )
    steps = min(len(one), len(other))
    seen, wanted = faults.samples(folder / "notes"), faults.samples(peace / "notes")
    places = range(steps)
    return {
        "steps_compared": steps,
        "curve_equal": one[:steps] == other[:steps],
        "each_step_once": [line["step"] for line in one] == list(range(1, len(one) + 1)),
        "samples_equal": all(
            seen[rank][place] == wanted[rank][place] for rank in wanted for place in places
        ),
    }


def rate(history: History) -> float:
    """Return steps per second over the run, its start left out."""
    started = next(event for event in history.events if event["event"] == "start")
    return len(history.lines) / (history.events[-1]["time"] - started["time"])


def main() -> int:
    """Carry out the bench; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8, choices=sorted(LAYOUTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    fire, peace = folder / "fire", folder / "peace"
    injector = Injector(fire / "out", fire / "notes", args.ranks, 60 * args.minutes, args.seed)
    ours = trained(fire, args.ranks, 1_000_000, injector)
    found = measured(ours, injector.made, injector.began)
    # The same number of steps ends the other run; the rate of learning does not hang on it.
    peaceful = threading.Thread(target=ends_at, args=(peace / "out", len(ours.lines)), daemon=True)
    peaceful.start()
    theirs = trained(peace, args.ranks, 1_000_000)
    found |= same(ours, theirs, fire, peace)
    found["throughput_kept"] = found["goodput"]
    found["steps_per_s"] = {"under_fire": rate(ours), "in_peace": rate(theirs)}
    found["checkpoints_left"] = len(candidates(fire / "out"))
    missed = misses(found)
    found |= {
        "missed": missed,
        "ranks": args.ranks,
        "layout": LAYOUTS[args.ranks],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "kinds": {kind: sum(f["kind"] == kind for f in injector.made) for kind in set(KINDS)},
        "each": injector.made,
    }
    if args.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "each"}, indent=1))
    if args.folder is None:
        shutil.rmtree(folder)
    return 1 if missed else 0


def ends_at(folder: Path, steps: int) -> None:
    """Ask this process's run to end once it has made so many steps."""
    while not faults.wait_for(folder, steps, 10.0):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def misses(found: dict[str, Any]) -> list[str]:
    """Return the marks that were missed."""
    missed = []
    for name, (way, mark) in MARKS.items():
        value = found[name]
        if value < mark if way == "least" else value > mark:
            missed.append(f"{name}: {value}, mark {mark}")
    for name in ("curve_equal", "each_step_once", "samples_equal"):
        if not found[name]:
            missed.append(name)
    return missed


if __name__ == "__main__":
    sys.exit(main())
