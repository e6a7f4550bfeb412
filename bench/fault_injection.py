"""Fault injection: real signals and real files, and a run under fire beside one in peace.

For ``bench/chaos.py`` and the tests of recovery.
"""

import json
import os
import random
import resource
import signal
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_command import parent
from rich.console import Console

from moefold.checkpoint.folder import list_candidates
from moefold.comm.config import Survive
from moefold.comm.elastic import launch_elastic
from moefold.comm.environment import RankInfo
from moefold.comm.worker import Attempt
from moefold.data.batch import MicroBatch
from moefold.data.prepare import prepare
from moefold.run import Run, load_run
from moefold.training.distributed import open_world
from moefold.training.hooks.assemble import assemble
from moefold.training.recover import MemoryCheckpoint
from moefold.training.run_folder import METRICS_FILE, History
from moefold.training.trainer import Interrupted, Trainer

# The server that ranks fork from gets no ``sys.path`` of its parent, and has to find this file.
PATHS = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in PATHS if path)

LAYOUTS = {8: "tp2 cp2 pp2 ep2 etp2", 4: "tp2 pp2 ep2"}
KINDS = ("kill", "stop", "pair", "torn", "full", "slow", "kill")
RECORD = Survive(limit=10_000, stopped_s=0.8)
LAST = 1_000_000
FIRST = 12
"""Steps before the first fault: some in step, and a checkpoint."""
BEHIND = 5
"""Steps between two faults, at least."""
SLOW_S, SLOW_TIMES = 0.2, 5
TIMES = ("tokens_per_s", "mfu", "step_time_s")
PARTS = ("detect_s", "restart_s", "load_s", "lost_s")

Fault = dict[str, Any]


def train_rank(
    info: RankInfo, attempt: Attempt, run: Run, folder: Path, notes: Path, until: int | None = None
) -> int:
    """Train as one rank of an elastic launch, and leave notes for who makes faults.

    Args:
        info: this rank's place.
        attempt: the launcher's word on this start.
        run: the run.
        folder: the run's.
        notes: folder for ``pid-R`` and ``samples-R.jsonl`` of each rank R.
        until: the last step, where that is not the run's.

    Returns:
        The last step.
    """
    memory = MemoryCheckpoint(attempt, run.watch.survive or RECORD)
    # Nothing of a full disk, which is a fault too, may end a rank here.
    with suppress(OSError):
        (notes / f"pid-{info.rank}").write_text(str(os.getpid()))
    with open_world(run, info, folder) as world:
        hooks = assemble(run.watch, Console(stderr=True))
        with Trainer(run, folder, hooks, world=world, memory=memory) as job:
            file = notes / f"samples-{world.rank}.jsonl"
            job.reader.read = noted(job.reader.read, file)  # type: ignore[method-assign]
            job.last_step = until or job.last_step
            with suppress(Interrupted):
                job.train()
            return job.step_number


Step = Callable[[int], list[MicroBatch]]


def noted(plain: Step, path: Path) -> Step:
    """Return a loader's step that also adds which tokens it gave to a file."""
    unsaid = b""

    def step(place: int) -> list[MicroBatch]:
        """Return the step's micro-batches, and note their tokens' checksum."""
        nonlocal unsaid
        batches, digest = plain(place), 0
        for batch in batches:
            digest = zlib.crc32(batch.ids_T.numpy().tobytes(), digest)
        unsaid += json.dumps([place, digest]).encode() + b"\n"
        # While the disk is full, which is a fault too, the notes wait.
        with suppress(OSError), path.open("ab", buffering=0) as file:
            unsaid = unsaid[file.write(unsaid) :]
        return batches

    return step


def samples(notes: Path) -> dict[int, dict[int, int]]:
    """Return, by rank and place in the data's order, the tokens' checksum of the last pass."""
    found: dict[int, dict[int, int]] = {}
    for path in sorted(notes.glob("samples-*.jsonl")):
        lines = path.read_text().splitlines()
        found[int(path.stem.partition("-")[2])] = dict(json.loads(line) for line in lines)
    return found


def pid_of(notes: Path, at: int, seconds: float = 30.0) -> int:
    """Return the process that a rank of this process's launcher is at present.

    Numbers of processes are used again, so one that is no rank of ours is never returned.

    Raises:
        TimeoutError: where the rank is not there in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            pid = int((notes / f"pid-{at}").read_text())
            if parent(parent(pid)) == os.getpid():
                return pid
        time.sleep(0.02)
    raise TimeoutError(f"rank {at} is not there")


def steps_in(folder: Path) -> int:
    """Return how many steps a run has written down."""
    path = folder / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(folder: Path, step: int, seconds: float = 120.0) -> bool:
    """Wait until a run has written a step down; say whether it did in time."""
    until = time.monotonic() + seconds
    while steps_in(folder) < step and time.monotonic() < until:
        time.sleep(0.02)
    return steps_in(folder) >= step


def kill(pid: int) -> None:
    """End a process as a machine's failure would; one that has ended already is left alone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Stop a process until someone else wakes it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


def slow(pid: int, seconds: float) -> None:
    """Let a process stand still for a time in which nobody wakes it."""
    stop(pid)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def tear(folder: Path, draws: random.Random) -> Path | None:
    """Cut a file of the newest checkpoint short, or flip one of its bits; return it if any."""
    whole = [found.path for found in list_candidates(folder) if not found.suffix]
    files = sorted(whole[0].glob("*.safetensors")) if whole else []
    if not files:
        return None
    chosen = draws.choice(files)
    with suppress(FileNotFoundError):
        size = chosen.stat().st_size
        if draws.random() < 0.5:
            os.truncate(chosen, draws.randrange(size))
        else:
            with chosen.open("r+b") as file:
                at = draws.randrange(size)
                file.seek(at)
                byte = file.read(1)[0] ^ 1 << draws.randrange(8)
                file.seek(at)
                file.write(bytes([byte]))
    return chosen


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Let no file of a process grow, as on a disk without room."""
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def run_of(ranks: int, *more: str) -> Run:
    """Return the tiny recipe in fp64, in the layout for so many ranks; it ends when told to.

    Args:
        ranks: how many.
        more: changes on top, as on the command line.
    """
    changes = {
        "train.precision": "fp64",
        "train.steps": LAST,
        "layout.sizes": json.dumps(LAYOUTS[ranks]),
        "watch.evaluate": "null",
        "watch.health": "null",
        "watch.pace": "null",
        "watch.time_out_s": 60,
        "watch.progress.style": '"off"',
        "watch.checkpoint": "{every: 10, keep: 2}",
    }
    return load_run("tiny", [*(f"{key}={value}" for key, value in changes.items()), *more])


def trained(
    folder: Path,
    ranks: int,
    until: int | None = None,
    injector: "Injector | None" = None,
    changes: Sequence[str] = (),
) -> History:
    """Train in a folder, to a step or until an injector ends it; return what the run wrote."""
    run = run_of(ranks, *changes)
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    prepare(run.data, folder / ".prepared")
    if injector is not None:
        injector.start()
    where = run, folder / "out", notes, until
    launch_elastic(train_rank, ranks, *where, record=RECORD, time_out_s=60.0)
    return History.read(folder / "out")


@dataclass(frozen=True)
class Fire:
    """For how long faults are made, and how many seconds apart."""

    seconds: float
    every_s: float = 27.0
    seed: int = 1


class Injector(threading.Thread):
    """Makes one fault after another while a run lasts, and ends it when its time is up.

    However slow the machine, no fault is made before the run is in step behind the one before it.

    Attributes:
        made: each fault: what, to which ranks, when (seconds since the epoch), after which step.
        error: what kept it from making more; empty where nothing did.
    """

    def __init__(
        self, folder: Path, ranks: int, fire: Fire, tell: Callable[[Fault], None] = lambda _: None
    ) -> None:
        """Prepare to make faults in the run that ``trained`` makes in a folder.

        Args:
            folder: given to ``trained`` too.
            ranks: how many ranks it has.
            fire: when.
            tell: hears of each fault, once it is made.
        """
        super().__init__(daemon=True)
        self._out, self._notes, self._ranks = folder / "out", folder / "notes", ranks
        self._fire, self._tell, self._draws = fire, tell, random.Random(fire.seed)
        self.made: list[Fault] = []
        self.error = ""

    def run(self) -> None:
        """Wait for the first steps, make faults at even times, and end the run."""
        try:
            self._make_all()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        # All ranks end at one step, whichever is told. Where none is left the run has ended.
        with suppress(TimeoutError):
            os.kill(pid_of(self._notes, 0), signal.SIGTERM)

    def _make_all(self) -> None:
        self._in_step(FIRST)
        fire, began = self._fire, time.monotonic()
        while (due := (len(self.made) + 1) * fire.every_s) < fire.seconds:
            kind = KINDS[len(self.made) % len(KINDS)]
            fault = {"kind": kind, "step": steps_in(self._out)}
            self.made.append(fault)
            fault |= {"ranks": self._victims(kind), "at": time.time()}
            self._make(fault)
            made_at = steps_in(self._out)
            self._tell(fault)
            time.sleep(max(0.0, began + due - time.monotonic()))
            self._in_step(made_at + BEHIND)
        time.sleep(max(0.0, began + fire.seconds - time.monotonic()))

    def _in_step(self, step: int) -> None:
        if not wait_for(self._out, step, 600):
            raise TimeoutError(f"the run did not come to step {step}")

    def _victims(self, kind: str) -> list[int]:
        """Draw a rank, or two."""
        first, second = self._draws.sample(range(self._ranks), 2)
        if kind == "full":
            first = first or 1  # The first rank writes the figures.
        return [first, second] if kind == "pair" else [first]

    def _make(self, fault: Fault) -> None:
        """Make a fault, and note when it was done."""
        kind = fault["kind"]
        pids = [pid_of(self._notes, rank) for rank in fault["ranks"]]
        if kind == "torn":
            fault["file"] = str(tear(self._out, self._draws))
        fault["at"] = time.time()
        if kind == "stop":
            stop(pids[0])
        elif kind == "slow":
            for _ in range(SLOW_TIMES):
                fault["at"] = time.time()
                slow(pids[0], SLOW_S)
                time.sleep(SLOW_S)
        elif kind == "full":
            with full_disk(pids[0]):
                time.sleep(self._fire.every_s / 2)
        else:
            for pid in pids:
                kill(pid)


def measured(history: History, made: list[Fault]) -> dict[str, Any]:
    """Return what the faults cost, and put beside each fault the recoveries that followed it.

    A recovery lasts from the fault until a step is done again; its parts end there at the first
    step's beginning.
    """
    step_s = {line["step"]: line["step_time_s"] for line in history.lines}
    for start in (event for event in history.events if "recovered" in event):
        lived = start["recovered"]
        before = [fault for fault in made if fault["at"] <= lived["noticed"]] or made[:1]
        fault = before[-1]
        detect_s = lived["noticed"] - fault["at"]
        fault.setdefault("recoveries", []).append(
            {
                "detect_s": detect_s,
                "restart_s": lived["restart_s"],
                "load_s": lived["load_s"],
                "lost_s": max(lived["under_way_s"] - detect_s, 0.0),
                "back_s": start["time"] - fault["at"] + step_s.get(start["step"] + 1, 0.0),
                # The step under way, or the one just done whose copies were under way.
                "steps_lost": max(1, lived["reached"] - start["step"]),
                "why": lived["why"],
            }
        )
    each = [figures for fault in made for figures in fault.get("recoveries", [])]
    parts = {part: sum(figures[part] for figures in each) for part in PARTS}
    wall = history.events[-1]["time"] - history.events[0]["time"]
    back = [figures["back_s"] for figures in each] or [0.0]
    return {
        "faults": len(made),
        "recoveries": len(each),
        "wall_s": wall,
        "parts_s": parts,
        "goodput": 1 - sum(parts.values()) / wall,
        "detect_s": max((figures["detect_s"] for figures in each), default=0.0),
        "back_s": statistics.median(back),
        "back_most_s": max(back),
        "steps_lost": max((figures["steps_lost"] for figures in each), default=0),
    }


def computed(history: History) -> list[dict[str, Any]]:
    """Return what a run wrote of each step but for how long it took."""
    return [
        {k: v for k, v in line.items() if k not in TIMES and not k.startswith("pace/")}
        for line in history.lines
    ]


def same(fire: Path, peace: Path) -> dict[str, Any]:
    """Compare every step's figures, and the tokens that each rank was given for it."""
    ours, theirs = (computed(History.read(folder / "out")) for folder in (fire, peace))
    seen, wanted = samples(fire / "notes"), samples(peace / "notes")
    differing = [line["step"] for line, other in zip(ours, theirs, strict=False) if line != other]
    return {
        "steps_compared": min(len(ours), len(theirs)),
        "first_difference": differing[0] if differing else None,
        "curve_equal": ours == theirs,
        "each_step_once": [line["step"] for line in ours] == list(range(1, len(ours) + 1)),
        "samples_equal": bool(seen) and seen == wanted,
    }


def rate(history: History) -> float:
    """Return steps per second of a run, from its first to its last event."""
    return len(history.lines) / (history.events[-1]["time"] - history.events[0]["time"])
