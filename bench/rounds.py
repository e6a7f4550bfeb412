"""Two of torchrun's agents on this machine, whose workers are killed: how soon do ranks meet again?

A worker of either agent is killed, or both, once or several times, or one agent joins late, so that
the agents' own counts of restarts differ by none, one and two. After each kill the ranks have to
meet within a minute and go on from the newest checkpoint; at the end every step has been done.

    python bench/rounds.py --trials 12 --save
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.training.run_folder import History

RESULTS = Path(__file__).parent / "results" / "rounds.json"
LIMIT_S = 60.0
SCENARIOS: dict[str, tuple[tuple[int, ...], ...]] = {
    "a worker of the first agent": ((0,),),
    "a worker of the second agent": ((1,),),
    "both": ((0, 1),),
    "one agent joins late": ((1,),),
    "counts differ by one": ((0,), (1, 0), (0,)),
    "counts differ by two": ((1,), (1,)),
}
"""The agents whose workers are killed, one kill after another."""
LATE_S = 4.0
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
    """Carry out the bench; return 1 if ranks did not meet in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--secret", action="store_true", help="the ranks share MOEFOLD_SECRET")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    found = []
    for number in range(args.trials):
        name = list(SCENARIOS)[number % len(SCENARIOS)]
        with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
            found.append(trial(Path(folder), name, "0123456789abcdef" * args.secret))
        print(json.dumps(found[-1]), flush=True)
    if args.save:
        RESULTS.write_text(json.dumps({"limit_s": LIMIT_S, "trials": found}, indent=1) + "\n")
    return 0 if all(one["met"] for one in found) else 1


def trial(folder: Path, scenario: str, secret: str = "") -> dict[str, Any]:
    """Run two agents through a scenario; return how long each meeting took, and where it began."""
    out, port = folder / "out", random.randrange(20_000, 32_000)
    late = LATE_S if scenario == "one agent joins late" else 0.0
    agents = [start_agent(folder, out, port, secret)]
    time.sleep(late)
    agents.append(start_agent(folder, out, port, secret))
    seconds, begun_at = [], []
    try:
        met = wait_for_start(out, 1, 2 * LIMIT_S)
        for number, victims in enumerate(SCENARIOS[scenario]):
            met = met and wait_for_checkpoint(out, number, LIMIT_S)
            began = time.monotonic()
            for worker in [pid for agent in victims for pid in workers_of(agents[agent].pid)]:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            met = met and wait_for_start(out, number + 2, LIMIT_S)
            seconds.append(round(time.monotonic() - began, 1))
            begun_at.append(starts(out)[-1] if met else None)
    finally:
        end(agents)
    goes_on = met and all(step and step % EVERY == 0 for step in begun_at)
    return {"scenario": scenario, "met": goes_on, "seconds": seconds, "resumed_at": begun_at}


def start_agent(folder: Path, out: Path, port: int, secret: str) -> "subprocess.Popen[bytes]":
    """Start an agent with one worker."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=rounds"]
    command += ["--max-restarts=9", "--monitor-interval=0.2", "-m", "moefold", "train", "tiny"]
    command += ["--layout", "ep2", "--folder", str(out), *OVERRIDES]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MOEFOLD_SECRET": secret}
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
