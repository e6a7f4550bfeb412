"""Does a long run grow? Memory, handles and threads of its processes between two moments.

Trains a tiny run of two ranks that saves every 10 steps behind its steps, evaluates, samples, and
writes all its logs, and asks every 10 seconds what its processes hold. What they hold around the
first moment (minute 10) and in the last minute may differ by less than 1 %.

    nohup python bench/growth.py --save > growth.log &

Memory is what processes have written (anonymous and shared memory; pages that ranks share with the
server that they fork from are counted once), and what they have mapped of it and of files (RSS).
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.training.run_folder import History

RESULTS = Path(__file__).parent / "results" / "growth.json"
EVERY_S = 10.0
LIMIT = 0.01
NICE = 10
OVERRIDES = (
    "train.steps=100000000",
    "optim.schedule_lr={kind: constant}",
    "watch.checkpoint={every: 10, keep: 3, asynchronous: true}",
    "watch.evaluate={every: 100, tokens: 2000}",
    "watch.sample={every: 100, prompts: [def], tokens: 16}",
    "watch.plots={every: 1000}",
    'watch.progress.style="lines"',
)
KINDS = ("written_kib", "rss_kib", "handles", "threads")

Sample = dict[str, Any]


def main() -> int:
    """Carry out the bench; return 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--since", type=float, default=10.0, help="first of the compared minutes")
    parser.add_argument("--folder", type=Path, help="for the run; an empty one")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    if not 1 <= args.since < args.minutes - 1:
        parser.error("--since must be at least 1 and more than a minute before --minutes")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="growth-"))
    samples = watch(folder / "out", 60 * args.minutes)
    found = compare(samples, 60 * args.since)
    found |= {"minutes": args.minutes, "steps": History.read(folder / "out").lines[-1]["step"]}
    print(json.dumps(found, indent=1), flush=True)
    if args.save:
        found["samples"] = samples
        RESULTS.write_text(json.dumps(found) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)
    return 0 if found["most"] < LIMIT else 1


def watch(out: Path, seconds: float) -> list[Sample]:
    """Train in a folder for so many seconds; return what the processes held every 10 seconds."""
    words = [sys.executable, "-m", "moefold", "train", "tiny", "--nproc", "2", "--layout", "ep2"]
    words += ["--folder", str(out), *OVERRIDES]
    out.parent.mkdir(parents=True, exist_ok=True)
    samples = list[Sample]()
    with (out.parent / "said").open("wb") as said:
        run = subprocess.Popen(words, stdout=said, stderr=said, preexec_fn=lambda: os.nice(NICE))
        try:
            while not (out / "metrics.jsonl").exists():
                require_alive(run, out)
                time.sleep(0.5)
            began = time.monotonic()
            while (now := time.monotonic() - began) < seconds:
                require_alive(run, out)
                samples.append({"s": round(now, 1), "processes": held(run.pid)})
                time.sleep(EVERY_S)
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(120)
    return samples


def require_alive(run: "subprocess.Popen[bytes]", out: Path) -> None:
    """Raise what the run said if it has ended."""
    if run.poll() is not None:
        said = (out.parent / "said").read_text(errors="replace")
        raise RuntimeError(f"the run ended with status {run.returncode}: {said[-2000:]}")


def held(launcher: int) -> dict[str, dict[str, int]]:
    """Return what each process of a run holds, by its place: launcher, tracker, server, ranks."""
    found = {}
    names = {launcher: "launcher"}
    for pid, parent, words in sorted(processes()):
        above = names.get(parent)
        if above == "launcher":
            names[pid] = "server" if b"forkserver" in words else "tracker"
        elif above == "server":
            names[pid] = f"rank {sum(name.startswith('rank') for name in names.values())}"
        if pid in names:
            with suppress(OSError):
                found[names[pid]] = measure(pid)
    return found


def processes() -> list[tuple[int, int, bytes]]:
    """Return (process, parent, command) of all processes of this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            found.append((int(entry.name), int(parent), (entry / "cmdline").read_bytes()))
    return found


def measure(pid: int) -> dict[str, int]:
    """Return a process's memory, open handles and threads."""
    place = Path(f"/proc/{pid}")
    sizes = dict(
        re.findall(r"^(\w+): +(\d+) kB", (place / "smaps_rollup").read_text(), re.MULTILINE)
    )
    return {
        "written_kib": int(sizes["Pss_Anon"]) + int(sizes["Pss_Shmem"]),
        "rss_kib": int(sizes["Rss"]),
        "handles": len(list((place / "fd").iterdir())),
        "threads": len(list((place / "task").iterdir())),
    }


def compare(samples: list[Sample], since_s: float) -> dict[str, Any]:
    """Return growth from the minute around ``since_s`` to the last minute, by kind."""
    end = samples[-1]["s"]
    before = [one for one in samples if abs(one["s"] - since_s) <= 30]
    after = [one for one in samples if one["s"] >= end - 60]
    parts = before, after
    growth = {}
    for kind in KINDS:
        then, last = (statistics.median(total(one, kind) for one in part) for part in parts)
        growth[kind] = {"then": then, "last": last, "growth": round(last / then - 1, 5)}
    return {"growth": growth, "most": max(one["growth"] for one in growth.values())}


def total(sample: Sample, kind: str) -> int:
    """Return the sum over all processes."""
    return sum(one[kind] for one in sample["processes"].values())


if __name__ == "__main__":
    sys.exit(main())
