"""Runs cases one after another on one set of processes, each case with groups of its own.

References come first, dealt out over the ranks; then the cases, the widest first, so that no rank
waits for others that have work left without it. What fails ends the processes; the cases left
start anew.
"""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from moefold.comm.collectives import gather_objects
from moefold.comm.environment import Spot
from moefold.comm.launch import launch
from moefold.comm.rendezvous import join
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, Subject
from moefold.proof.compare import Outcome, degenerate, facts_of, judge, measure, write_reference
from moefold.proof.rank_run import InjectedFault, RankResult, run_rank

TIME_OUT_S = 120.0
DRAWS = 16
"""How many seeds are tried for a reference in which every expert has tokens."""
PLAIN = Layout()


@dataclass(frozen=True)
class CaseTask:
    """A case, where its reference lies, and what goes wrong in it on purpose."""

    case: ProofCase
    reference: str
    fault: InjectedFault | None = None


class CaseFailed(RuntimeError):
    """A case or its reference ended with an error on this rank; the text is its number and that."""


Told = Callable[[int, Outcome], None]
"""Called with a case's number and outcome as it is known."""


def run_cases(
    cases: Sequence[ProofCase],
    faults: Sequence[InjectedFault | None] = (),
    *,
    told: Told | None = None,
    time_out_s: float = TIME_OUT_S,
) -> list[Outcome]:
    """Run cases and return their outcomes in order; those of one subject share its reference.

    ``faults`` are, for each case, what goes wrong in it on purpose.
    """
    outcomes: dict[int, Outcome] = {}

    def keep(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        if told is not None:
            told(number, outcome)

    with tempfile.TemporaryDirectory(prefix="moefold-proof-") as folder:
        references: dict[Subject, str] = {}
        for case in cases:
            references.setdefault(case.subject, str(Path(folder, f"{len(references)}.safetensors")))
        tasks = {
            n: CaseTask(cases[n], references[cases[n].subject], faults[n] if faults else None)
            for n in sorted(range(len(cases)), key=lambda number: -cases[number].world)
        }
        while len(outcomes) < len(cases):
            left = {number: task for number, task in tasks.items() if number not in outcomes}
            error = _run(left, keep, time_out_s)
            if error is not None:  # of a case that it names, else of the one that ranks were at
                named = (int(n) for n in re.findall(rf"{CaseFailed.__name__}: (\d+)", error))
                ended = next(n for n in (*named, *left) if n not in outcomes)
                keep(ended, Outcome(problems=(error,)))
            assert error is not None or len(outcomes) == len(cases), "ranks ended without a word"
    return [outcomes[number] for number in range(len(cases))]


def _run(tasks: dict[int, CaseTask], keep: Told, time_out_s: float) -> str | None:
    """Run tasks until one fails; returns what the first that failed had to say."""
    ours, theirs = Pipe(duplex=False)
    ranks = max(task.case.world for task in tasks.values())
    given = list(tasks.items()), theirs, time_out_s
    failed: list[str] = []

    def start() -> None:
        try:
            launch(_work, ranks, *given, time_out_s=time_out_s)
        except Exception as error:
            failed.append(str(error))
        finally:
            theirs.close()

    # Beside the main thread, which a signal then ends, and the ranks with it.
    launcher = threading.Thread(target=start, daemon=True)
    launcher.start()
    while True:
        try:
            keep(*ours.recv())
        except (EOFError, OSError):
            break
    launcher.join()
    return failed[0] if failed else None


# --------------------------------------------------------------------------------- on each rank


def _work(
    spot: Spot, tasks: list[tuple[int, CaseTask]], told: Connection, time_out_s: float
) -> None:
    """Run every task that this rank is in."""
    with World.open(Folding(Sizes(), spot.world), "cpu", time_out_s) as everyone:
        subjects = {Path(task.reference): (number, task.case.subject) for number, task in tasks}
        for turn, (path, (number, subject)) in enumerate(subjects.items()):
            if turn % spot.world == spot.rank and not path.exists():
                with _naming(number):
                    write_reference(path, *draw(subject))
        gather_objects("references are there", everyone.on_host)
    for number, task in tasks:
        case = task.case
        if spot.rank >= case.world:
            continue
        started = time.perf_counter()
        with _naming(number):
            if case.world > 1:
                join(spot._replace(world=case.world, attempt=number + 1), time_out_s)
            with World.open(case.folding, "cpu", time_out_s) as world:
                facts = facts_of(Path(task.reference))
                drawn = replace(case, subject=replace(case.subject, seed=facts["seed"]))
                found = measure(Path(task.reference), run_rank(drawn, world, task.fault))
                answers = gather_objects(found, world.on_host)
        if spot.rank == 0:
            outcome = judge(facts, answers)
            outcome.seconds = time.perf_counter() - started
            told.send((number, outcome))


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Let an error within say which case it ends."""
    try:
        yield
    except Exception as error:
        raise CaseFailed(f"{number}: {type(error).__name__}: {error}") from error


def draw(subject: Subject) -> tuple[Subject, RankResult]:
    """Return the subject with the first seed by which nothing is degenerate, and what came of it.

    Where a token goes to few experts, one may be left out by chance. What is degenerate by every
    seed is so by more than that: then the first is kept, and the proof fails by it.
    """
    tries = []
    for seed in range(subject.seed, subject.seed + DRAWS):
        drawn = replace(subject, seed=seed)
        tries.append((drawn, run_rank(ProofCase("one rank", drawn, PLAIN, 1), World.single())))
        if not degenerate(*tries[-1]):
            return tries[-1]
    return tries[0]
