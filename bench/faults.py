"""Every process of a run is ended at every moment: does the resumed run equal the unbroken one?

Launcher, fork server, a rank, and a rank while its thread writes are sent SIGKILL, SIGTERM, or
SIGSTOP and then SIGKILL at 12 moments of a run of two ranks. After each, nothing may stay (process,
listening socket, shared memory, temporary file), and the run that is resumed as the program says
must have the bits of the unbroken one: weights, optimizer state, progress, logs and samples.

    nohup python bench/faults.py --trials 120 --save > faults.log &
    python bench/faults.py --table

Combinations that do not exist (no server during an export) are named in the table. Exit status 1 if
anything was found.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from fault_trials import MOMENTS, SIGNALS, VICTIMS, Bench, Fault, draw, existing, trial

RESULTS = Path(__file__).parent / "results" / "faults.json"
MARKED_TRIALS = 90
LIMIT_S = 3000.0


def main() -> int:
    """Carry out the bench; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=len(existing()))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moment", choices=MOMENTS, help="only faults at this moment")
    parser.add_argument("--victim", choices=VICTIMS, help="only faults of this process")
    parser.add_argument("--signal", choices=SIGNALS, help="only faults by this signal")
    again = "repeat the stored trials in which something was found, and store them anew"
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument("--folder", type=Path, help="for all runs; an empty one")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    parser.add_argument("--table", action="store_true", help="print the table of what is stored")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULTS.read_text())["trials"]))
        return 0
    folder = args.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    shown = os.fdopen(os.dup(1), "w", buffering=1)
    with (folder / "said").open("w") as said:  # what ranks of resumed runs say
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    kept = list[dict[str, Any]]()
    seconds = 0
    if args.again:
        stored = json.loads(RESULTS.read_text())
        kept = [one for one in stored["trials"] if not one["problems"]]
        faults = [fault_of(one) for one in stored["trials"] if one["problems"]]
        args.seed = stored["seed"]
        args.save = True
        seconds = stored["seconds"]
    else:
        faults = chosen(args)
    began = time.monotonic()
    found = kept + carry_out(faults, folder, shown)
    seconds += round(time.monotonic() - began)
    failed = [one for one in found if one["problems"]]
    result = {"seed": args.seed, "seconds": seconds, "failed": len(failed)}
    result["repeated"] = len(faults) if args.again else 0
    if args.save:
        RESULTS.write_text(json.dumps(result | {"trials": found}, indent=1) + "\n")
    print(f"{result}\n{table(found)}", file=shown)
    if args.folder is None and not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


def chosen(args: argparse.Namespace) -> list[Fault]:
    """Return the faults that the arguments choose."""
    drawn = draw(max(args.trials, len(existing())), args.seed)
    wanted = {"moment": args.moment, "victim": args.victim, "signal": args.signal}
    return [
        fault
        for fault in drawn
        if all(value in (None, getattr(fault, name)) for name, value in wanted.items())
    ][: args.trials]


def fault_of(found: dict[str, Any]) -> Fault:
    """Return the fault of a stored trial."""
    return Fault(found["moment"], found["victim"], found["signal"], found["rank"])


def carry_out(faults: list[Fault], folder: Path, shown: TextIO) -> list[dict[str, Any]]:
    """Carry out faults; return what was found, and keep the folders in which something was."""
    bench = Bench(folder / "bench")
    found = list[dict[str, Any]]()
    for number, fault in enumerate(faults):
        place = folder / f"{number:03d}"
        found.append(trial(bench, fault, place))
        print(json.dumps(found[-1]), file=shown)
        if not found[-1]["problems"]:
            shutil.rmtree(place)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return what was found as a table: exit statuses by moment and victim, signals in order."""
    lines = [
        f"| moment | {' | '.join(VICTIMS)} |",
        f"|---|{'---|' * len(VICTIMS)}",
    ]
    there = {(fault.moment, fault.victim) for fault in existing()}
    for moment in MOMENTS:
        cells = []
        for victim in VICTIMS:
            of = [one for one in found if (one["moment"], one["victim"]) == (moment, victim)]
            by_signal = [cell([one for one in of if one["signal"] == sent]) for sent in SIGNALS]
            cells.append(" · ".join(by_signal) if (moment, victim) in there else "none then")
        lines.append(f"| {moment} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(found: list[dict[str, Any]]) -> str:
    """Return the exit statuses of the same trials, and whether all of them were well."""
    if not found:
        return "not tried"
    wrong = "" if all(not one["problems"] for one in found) else " **differs**"
    return ", ".join(sorted({str(one["status"]) for one in found})) + wrong


if __name__ == "__main__":
    sys.exit(main())
