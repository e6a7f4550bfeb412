"""Two of torchrun's agents on this machine, whose workers are killed: how soon do ranks meet again?

A worker of either agent is killed, or both, once or several times, or one agent joins late, so that
the agents' own counts of restarts differ by none, one and two. After each kill the ranks have to
meet within a minute and go on from the newest checkpoint; at the end, each step so far has been
done once.

    python bench/rounds.py --trials 12 --save
    python bench/rounds.py --trials 12 --secret --save
    python bench/rounds.py --table

The last prints what is stored as the table of docs/launch.md.
"""

import argparse
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.checkpoint.folder import list_candidates
from moefold.comm.environment import SECRET
from moefold.training.run_folder import History

RESULTS = Path(__file__).parent / "results"
STORED = {False: RESULTS / "rounds.json", True: RESULTS / "rounds_secret.json"}
"""By whether ranks share a secret."""
LIMIT_S = 60.0
"""Most seconds from a kill to the next start."""
PATIENCE_S = 600.0
"""Most seconds of what is not measured: the first start, and steps up to a checkpoint."""
SCENARIOS: dict[str, tuple[tuple[int, ...], ...]] = {
    "a worker of the first agent": ((0,),),
    "a worker of the second agent": ((1,),),
    "both": ((0, 1),),
    "one agent joins late": ((1,),),
    "counts differ by one, then both": ((0,), (0, 1)),
    "counts differ by two, then both": ((1,), (1,), (0, 1)),
}
"""The agents whose workers are killed, one kill after another."""
LATE = "one agent joins late"
LATE_S = 4.0
COUNT = b"TORCHELASTIC_RESTART_COUNT="
SETTLE_S = 0.3
"""Seconds in which what is being published when a worker is killed is there, or never will be."""
STEPS, EVERY = 400, 5
OVERRIDES = (
    f"train.steps={STEPS}",
    f"watch.checkpoint={{every: {EVERY}, keep: 2}}",
    "watch.evaluate=null",
    "watch.plots=null",
    "watch.pace=null",
    "watch.time_out_s=30",
    'watch.progress.style="off"',
)


def main() -> int:
    """Carry out the bench; return 1 if ranks did not meet in time, or not where they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--secret", action="store_true", help=f"the ranks share {SECRET}")
    parser.add_argument("--save", action="store_true", help=f"write a file in {RESULTS}")
    parser.add_argument("--table", action="store_true", help="print what is stored")
    args = parser.parse_args()
    if args.table:
        print(table())
        return 0
    found = []
    for number in range(args.trials):
        name = list(SCENARIOS)[number % len(SCENARIOS)]
        with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
            found.append(trial(Path(folder), name, args.secret))
        print(json.dumps(found[-1]), flush=True)
    if args.save:
        kept = {"limit_s": LIMIT_S, "secret": args.secret, "trials": found}
        STORED[args.secret].write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(one["as_it_should"] for one in found) else 1


def table() -> str:
    """Return a table in Markdown of the stored trials, by scenario."""
    lines = [
        "| killed | restarts counted by the agents | seconds, most | as it should |",
        "|---|---|---|---|",
    ]
    stored = [json.loads(path.read_text()) for path in STORED.values() if path.exists()]
    trials = [one for each in stored for one in each["trials"]]
    for scenario in SCENARIOS:
        found = [one for one in trials if one["scenario"] == scenario]
        meetings = [each for one in found for each in one["meetings"]]
        counts = dict.fromkeys("{} and {}".format(*each["counts"]) for each in meetings)
        most = max(each["seconds"] or math.inf for each in meetings)
        right = f"{sum(one['as_it_should'] for one in found)} of {len(found)}"
        lines.append(f"| {scenario} | {', '.join(counts)} | {most} | {right} |")
    return "\n".join(lines)


def trial(folder: Path, scenario: str, has_secret: bool = False) -> dict[str, Any]:
    """Run two agents through a scenario.

    Returns:
        The scenario and, by meeting after a kill: the seconds until it (None if there was none in
        time), each agent's count of restarts, the step of the newest checkpoint, and the step at
        which the ranks went on. ``each_step_once`` tells of the steps' metrics, and
        ``as_it_should`` whether all is right.
    """
    out, port = folder / "out", random.randrange(20_000, 32_000)
    secret = secrets.token_hex(16) if has_secret else ""
    agents = [start_agent(folder, out, port, secret)]
    time.sleep(LATE_S if scenario == LATE else 0.0)
    agents.append(start_agent(folder, out, port, secret))
    meetings = []
    try:
        if wait_for_start(out, 1, PATIENCE_S):
            for number, victims in enumerate(SCENARIOS[scenario]):
                meetings.append(meeting_after(out, number, agents, victims))
                if meetings[-1]["seconds"] is None:
                    break
            wait_for_checkpoint(out, len(meetings), PATIENCE_S)
    finally:
        end(agents)
    steps = [line["step"] for line in History.read(out).lines]
    each_step_once = bool(steps) and steps == list(range(1, steps[-1] + 1))
    as_it_should = (
        each_step_once
        and len(meetings) == len(SCENARIOS[scenario])
        and all(one["went_on_at"] == one["newest"] for one in meetings)
    )
    return {
        "scenario": scenario,
        "meetings": meetings,
        "each_step_once": each_step_once,
        "as_it_should": as_it_should,
    }


def meeting_after(
    out: Path, number: int, agents: Sequence["subprocess.Popen[bytes]"], victims: Sequence[int]
) -> dict[str, Any]:
    """Kill the workers of some agents after a checkpoint, and wait until all ranks meet again."""
    wait_for_checkpoint(out, number, PATIENCE_S)
    began = time.monotonic()
    for worker in [pid for agent in victims for pid in workers_of(agents[agent].pid)]:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    time.sleep(SETTLE_S)
    newest = next(each.step for each in list_candidates(out) if not each.suffix)
    has_met = wait_for_start(out, number + 2, LIMIT_S)
    return {
        "killed": list(victims),
        "seconds": round(time.monotonic() - began, 1) if has_met else None,
        "counts": [count for agent in agents for count in counts_of(agent.pid)],
        "newest": newest,
        "went_on_at": starts(out)[-1] if has_met else None,
    }


def start_agent(folder: Path, out: Path, port: int, secret: str) -> "subprocess.Popen[bytes]":
    """Start an agent with one worker."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=rounds"]
    command += ["--max-restarts=9", "--monitor-interval=0.2", "-m", "moefold", "train", "tiny"]
    command += ["--layout", "ep2", "--folder", str(out), *OVERRIDES]
    env = os.environ | {"OMP_NUM_THREADS": "1", SECRET: secret}
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=env, start_new_session=True)


def starts(out: Path) -> list[int]:
    """Return the steps at which the run has started so far."""
    with suppress(OSError, ValueError, KeyError):
        events = History.read(out).events
        return [event["step"] for event in events if event["event"] == "start"]
    return []


def wait_for_start(out: Path, count: int, limit_s: float) -> bool:
    """Wait until the run has started so many times; return whether it did."""
    return _wait(lambda: len(starts(out)) >= count, limit_s)


def wait_for_checkpoint(out: Path, number: int, limit_s: float) -> bool:
    """Wait for a checkpoint of the present start, and some steps after it."""
    since = starts(out)[number]

    def is_there() -> bool:
        with suppress(OSError, ValueError, IndexError):
            return History.read(out).lines[-1]["step"] > since + EVERY + 1
        return False

    return _wait(is_there, limit_s)


def workers_of(agent: int) -> Sequence[int]:
    """Return the processes of an agent's workers."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
                if int(fields[1]) == agent and b"moefold" in command:
                    found.append(int(entry.name))
    return found


def counts_of(agent: int) -> list[int]:
    """Return what an agent's workers are told of how often it has restarted them."""
    found = []
    for worker in workers_of(agent):
        with suppress(OSError):
            words = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
            found += [int(word[len(COUNT) :]) for word in words if word.startswith(COUNT)]
    return found


def end(agents: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End agents and their workers, which are in sessions of their own."""
    for agent in agents:
        workers = workers_of(agent.pid)
        agent.kill()
        agent.wait()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def _wait(condition: Any, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    sys.exit(main())
