"""Eight ranks in a folded five-dimensional layout, and a fault at least every 30 seconds.

First the run under fire: ranks are killed and stopped, alone and in pairs, checkpoints torn, disks
filled, ranks held up. Then the same number of steps in peace. Every loss must be the same to the
last bit, and every step have seen the same tokens. Exit status 1 where a mark is missed.

    python bench/chaos.py --minutes 2 --ranks 4
    nohup python bench/chaos.py --save --folder runs/chaos > chaos.log &

What is known is written as it comes: faults as they are made, figures once the fire is over.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
from fault_injection import LAYOUTS, Fault, Fire, Injector, measured, rate, same, trained

from moefold.checkpoint.folder import list_candidates

RESULTS = Path(__file__).parent / "results" / "chaos.json"
MARKS = {
    "faults": ("least", 60),
    "detect_s": ("most", 2.0),
    "back_s": ("most", 5.0),
    "steps_lost": ("most", 1),
    "goodput": ("least", 0.85),
    "throughput_kept": ("least", 0.85),
}
"""``back_s`` is the median, ``detect_s`` and ``steps_lost`` are of the worst fault."""
EQUAL = ("curve_equal", "each_step_once", "samples_equal")
MARKED_MINUTES = 30.0
"""A shorter fire need not make as many faults."""


def main() -> int:
    """Carry out the bench; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MARKED_MINUTES)
    parser.add_argument("--ranks", type=int, default=8, choices=sorted(LAYOUTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for both runs; an empty one")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty: a run found there would go on")
    found: dict[str, Any] = {
        "ranks": args.ranks,
        "layout": LAYOUTS[args.ranks],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seed": args.seed,
        "missed": ["the bench was broken off"],
    }
    record = RESULTS if args.save else folder / "chaos.json"
    fight(folder, args, found, record)
    found["missed"] = misses(found, args.minutes)
    write(found, record)
    print(json.dumps({k: v for k, v in found.items() if k != "each"}, indent=1), flush=True)
    if args.folder is None and not found["missed"]:
        shutil.rmtree(folder)
    return 1 if found["missed"] else 0


def fight(folder: Path, args: argparse.Namespace, found: dict[str, Any], record: Path) -> None:
    """Train under fire, then in peace, and add to what was found."""
    fire, peace = folder / "fire", folder / "peace"

    def tell(fault: Fault) -> None:
        ranks = ", ".join(map(str, fault["ranks"]))
        now = time.strftime("%H:%M:%S")
        print(f"{now} step {fault['step']}: {fault['kind']}, rank {ranks}", flush=True)
        write(found, record)

    injector = Injector(fire, args.ranks, Fire(60 * args.minutes, seed=args.seed), tell)
    found["each"] = injector.made
    ours = trained(fire, args.ranks, injector=injector)
    found |= measured(ours, injector.made)
    found |= {"injector": injector.error, "checkpoints_left": len(list_candidates(fire / "out"))}
    found["kinds"] = {
        kind: sum(fault["kind"] == kind for fault in injector.made)
        for kind in sorted({fault["kind"] for fault in injector.made})
    }
    write(found, record)
    print(f"{len(ours.lines)} steps under fire, goodput {found['goodput']:.3f}", flush=True)
    theirs = trained(peace, args.ranks, until=len(ours.lines))
    found |= same(fire, peace)
    found["steps_per_s"] = {"under_fire": rate(ours), "in_peace": rate(theirs)}
    found["throughput_kept"] = rate(ours) / rate(theirs)


def write(found: dict[str, Any], path: Path) -> None:
    """Write what is known so far; whoever reads finds the whole of it or of what was before."""
    part = path.with_suffix(".part")
    order = sorted(found, key=lambda key: key == "each")
    part.write_text(json.dumps({key: found[key] for key in order}, indent=1) + "\n")
    part.replace(path)


def misses(found: dict[str, Any], minutes: float) -> list[str]:
    """Return the marks that were missed."""
    missed = []
    for name, (way, mark) in MARKS.items():
        value = found[name]
        if name == "faults":
            mark = int(mark * min(1.0, minutes / MARKED_MINUTES))
        if value < mark if way == "least" else value > mark:
            missed.append(f"{name}: {value}, mark {mark}")
    missed += [name for name in EQUAL if not found[name]]
    return missed + [found["injector"]] * bool(found["injector"])


if __name__ == "__main__":
    sys.exit(main())
