"""A run under fire beside the same run in peace: what the faults cost, and that no bit shows them.

For ``bench/chaos.py`` and its short form among the tests.
"""

import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.comm.config import Survive
from moefold.comm.respawn import survive
from moefold.data.prepare import prepare
from moefold.run import Run, load_run
from moefold.training import faults
from moefold.training.history import History

LAYOUTS = {8: "tp2 cp2 pp2 ep2 etp2", 4: "tp2 pp2 ep2"}
KINDS = ("kill", "stop", "pair", "torn", "full", "slow", "kill")
RECORD = Survive(limit=10_000, stopped_s=0.5)
LAST = 1_000_000
FIRST = 12
"""Steps before the first fault: some in step, and a checkpoint."""
BEHIND = 5
"""Steps between two faults, at least: without a rank that is lost the others do one, at most."""
SLOW_S, SLOW_TIMES = 0.2, 5
TIMES = ("tokens_per_s", "mfu", "step_time_s")
PARTS = ("detect_s", "restart_s", "load_s", "lost_s")

Fault = dict[str, Any]


def run_of(ranks: int) -> Run:
    """Return the tiny recipe in fp64, in the layout for so many ranks; it ends when told to."""
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
    return load_run("tiny", [f"{key}={value}" for key, value in changes.items()])


def trained(
    folder: Path, ranks: int, until: int | None = None, injector: "Injector | None" = None
) -> History:
    """Train in a folder, to a step or until an injector ends it; return what the run wrote."""
    run, notes = run_of(ranks), folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    prepare(run.data, folder / ".prepared")
    if injector is not None:
        injector.start()
    where = run, folder / "out", notes, until
    survive(faults.rank, ranks, *where, record=RECORD, time_out_s=60.0)
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
            os.kill(faults.pid_of(self._notes, 0), signal.SIGTERM)

    def _make_all(self) -> None:
        self._in_step(FIRST)
        fire, began = self._fire, time.monotonic()
        while (due := (len(self.made) + 1) * fire.every_s) < fire.seconds:
            kind = KINDS[len(self.made) % len(KINDS)]
            fault = {"kind": kind, "step": faults.steps_in(self._out)}
            self.made.append(fault)
            fault |= {"ranks": self._victims(kind), "at": time.time()}
            self._make(fault)
            made_at = faults.steps_in(self._out)
            self._tell(fault)
            time.sleep(max(0.0, began + due - time.monotonic()))
            self._in_step(made_at + BEHIND)
        time.sleep(max(0.0, began + fire.seconds - time.monotonic()))

    def _in_step(self, step: int) -> None:
        if not faults.wait_for(self._out, step, 600):
            raise TimeoutError(f"the run did not come to step {step}")

    def _victims(self, kind: str) -> list[int]:
        """Draw a rank, or two; two that keep each other's copies are never lost together."""
        first, second = self._draws.sample(range(self._ranks), 2)
        if kind == "full":
            first = first or 1  # The first rank writes the figures.
        if (first - second) % self._ranks == self._ranks // 2:
            second = (second + 1) % self._ranks
        return [first, second] if kind == "pair" else [first]

    def _make(self, fault: Fault) -> None:
        """Make a fault, and note when it was done."""
        kind = fault["kind"]
        pids = [faults.pid_of(self._notes, rank) for rank in fault["ranks"]]
        if kind == "torn":
            fault["file"] = str(faults.tear(self._out, self._draws))
        fault["at"] = time.time()
        if kind == "stop":
            faults.stop(pids[0])
        elif kind == "slow":
            for _ in range(SLOW_TIMES):
                fault["at"] = time.time()
                faults.slow(pids[0], SLOW_S)
                time.sleep(SLOW_S)
        elif kind == "full":
            with faults.full_disk(pids[0]):
                time.sleep(self._fire.every_s / 2)
        else:
            for pid in pids:
                faults.kill(pid)


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
    seen, wanted = faults.samples(fire / "notes"), faults.samples(peace / "notes")
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
