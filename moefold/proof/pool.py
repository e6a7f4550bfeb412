"""Runs a proof's cases one after another on one set of processes, with new groups for each case.

References come first, distributed over the ranks; then the cases, those with most ranks first, so
that no rank waits for cases that it is not in. An error ends the processes; the remaining cases
run in new ones.
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
from moefold.comm.environment import RankInfo
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
"""Maximum number of seeds tried for a reference that is not degenerate."""
PLAIN = Layout()


@dataclass(frozen=True)
class CaseTask:
    """A case, the path of its reference, and the fault to inject, if any."""

    case: ProofCase
    reference: str
    fault: InjectedFault | None = None


class CaseFailed(RuntimeError):
    """A case or its reference failed on this rank; the text is the case's number and the error."""


Told = Callable[[int, Outcome], None]
"""Called with the number and the outcome of each case when it ends."""


def run_cases(
    cases: Sequence[ProofCase],
    faults: Sequence[InjectedFault | None] = (),
    *,
    told: Told | None = None,
    time_out_s: float = TIME_OUT_S,
) -> list[Outcome]:
    """Run cases and return their outcomes in order; cases of one subject share its reference.

    ``faults``: the fault to inject into each case, or nothing.
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
            if error is not None:  # of the case that it names, else of the first one left
                named = (int(n) for n in re.findall(rf"{CaseFailed.__name__}: (\d+)", error))
                ended = next(n for n in (*named, *left) if n not in outcomes)
                keep(ended, Outcome(problems=(error,)))
            assert error is not None or len(outcomes) == len(cases), "ranks ended without an error"
    return [outcomes[number] for number in range(len(cases))]


def _run(tasks: dict[int, CaseTask], keep: Told, time_out_s: float) -> str | None:
    """Run tasks until one fails; return the error, or None."""
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

    # In a thread, so that a signal can end the main thread, and the ranks with it.
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
    info: RankInfo, tasks: list[tuple[int, CaseTask]], told: Connection, time_out_s: float
) -> None:
    """Run every task in which this rank takes part."""
    with World.open(Folding(Sizes(), info.world_size), "cpu", time_out_s) as everyone:
        subjects = {Path(task.reference): (number, task.case.subject) for number, task in tasks}
        for turn, (path, (number, subject)) in enumerate(subjects.items()):
            if turn % info.world_size == info.rank and not path.exists():
                with _naming(number):
                    write_reference(path, *draw(subject))
        gather_objects("references are there", everyone.on_host)
    for number, task in tasks:
        case = task.case
        if info.rank >= case.world:
            continue
        started = time.perf_counter()
        with _naming(number):
            if case.world > 1:
                join(info._replace(world_size=case.world, attempt=number + 1), time_out_s)
            with World.open(case.folding, "cpu", time_out_s) as world:
                facts = facts_of(Path(task.reference))
                drawn = replace(case, subject=replace(case.subject, seed=facts["seed"]))
                found = measure(Path(task.reference), run_rank(drawn, world, task.fault))
                answers = gather_objects(found, world.on_host)
        if info.rank == 0:
            outcome = judge(facts, answers)
            outcome.seconds = time.perf_counter() - started
            told.send((number, outcome))


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Add the case's number to errors in the context."""
    try:
        yield
    except Exception as error:
        raise CaseFailed(f"{number}: {type(error).__name__}: {error}") from error


def draw(subject: Subject) -> tuple[Subject, RankResult]:
    """Return the subject with the first seed for which nothing is degenerate, and its results.

    If a token goes to few experts, one of them may get none by chance. If the results of all seeds
    are degenerate, it is not by chance: the first is returned, and the proof fails.
    """
    tries = []
    for seed in range(subject.seed, subject.seed + DRAWS):
        drawn = replace(subject, seed=seed)
        tries.append((drawn, run_rank(ProofCase("one rank", drawn, PLAIN, 1), World.single())))
        if not degenerate(*tries[-1]):
            return tries[-1]
    return tries[0]
