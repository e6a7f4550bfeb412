"""Faults made on purpose, with real signals and real files: for tests and ``bench/chaos.py``."""

import json
import os
import random
import resource
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from moefold.checkpoint.folder import candidates
from moefold.comm.environment import Spot
from moefold.comm.respawn_rank import Line
from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.data.loader import Loader
from moefold.run import Run
from moefold.training.feed import Feed
from moefold.training.history import METRICS_FILE
from moefold.training.hooks.assemble import assemble
from moefold.training.loop import Interrupted, Job
from moefold.training.ranks import world_of
from moefold.training.recover import Keeper


def rank(line: Line, run: Run, folder: Path, notes: Path, until: int | None = None) -> int:
    """Train as one rank that survives others, and leave notes for who makes faults.

    Args:
        line: to the launcher.
        run: the run.
        folder: the run's.
        notes: folder for ``pid-R`` and ``samples-R.jsonl`` of each rank R.
        until: the last step, where that is not the run's.

    Returns:
        The last step.
    """
    keeper = Keeper(line)

    def attempt(spot: Spot) -> int:
        # Nothing of a full disk, which is a fault too, may end a rank here.
        with suppress(OSError):
            (notes / f"pid-{spot.rank}").write_text(str(os.getpid()))
        with world_of(run, spot, folder) as world:
            hooks = assemble(run.watch, Console(stderr=True))
            with Job(run, folder, hooks, world=world, keeper=keeper) as job:
                job.feed = NotedFeed(job.loader, world, notes)
                job.last_step = until or job.last_step
                with suppress(Interrupted):
                    job.train()
                return job.step_number

    return line.through(attempt)


class NotedFeed(Feed):
    """A feed that writes down which tokens each step was trained on."""

    def __init__(self, loader: Loader, world: World, notes: Path) -> None:
        """Add to this rank's notes."""
        super().__init__(loader, world)
        self._file = notes / f"samples-{world.rank}.jsonl"
        self._unsaid = b""

    def step(self, place: int) -> list[MicroBatch]:
        """Return the step's micro-batches, and note their tokens' checksum."""
        batches = super().step(place)
        digest = 0
        for batch in batches:
            digest = zlib.crc32(batch.ids_T.numpy().tobytes(), digest)
        self._unsaid += json.dumps([place, digest]).encode() + b"\n"
        # While the disk is full, which is a fault too, the notes wait.
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            self._unsaid = self._unsaid[file.write(self._unsaid) :]
        return batches


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
            if _parent(_parent(pid)) == os.getpid():
                return pid
        time.sleep(0.02)
    raise TimeoutError(f"rank {at} is not there")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
    """Stop a process, for good unless someone else continues it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


def slow(pid: int, seconds: float) -> None:
    """Let a process stand still for a time that nobody takes it for dead in."""
    stop(pid)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def tear(folder: Path, draws: random.Random) -> Path | None:
    """Cut a file of the newest checkpoint short, or flip one of its bits; return it if any."""
    whole = [found.path for found in candidates(folder) if not found.way]
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
