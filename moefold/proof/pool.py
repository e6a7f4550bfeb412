"""Runs a proof's cases one after another in one set of processes, with new groups for each case.

References come first, distributed over the ranks; then cases, those with most ranks first, so that
no rank waits for cases without it. An error ends the processes; the remaining cases run in new
ones.
"""

import re
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
from moefold.comm.fork_server import fork_server
from moefold.comm.launch import launch
from moefold.comm.rendezvous import join
from moefold.comm.world import World
from moefold.config.slot import modules_to_preload
from moefold.files import scratch_folder
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, Subject
from moefold.proof.compare import (
    Outcome,
    combine_ranks,
    compare_rank,
    find_degenerate,
    read_facts,
    write_reference,
)
from moefold.proof.rank_run import InjectedFault, RankResult, run_rank

TIME_OUT_S = 120.0
MAX_SEEDS = 16
"""Maximum number of seeds tried for a reference that is not degenerate."""
ONE_RANK = Layout()


@dataclass(frozen=True)
class CaseTask:
    """A case, the path of its reference, and the fault to inject, if any."""

    case: ProofCase
    reference: str
    fault: InjectedFault | None = None


class CaseFailed(RuntimeError):
    """A case or its reference failed on this rank; the message is the case's number and error."""


OnOutcome = Callable[[int, Outcome], None]
"""Called with number and outcome of each case when it ends."""


def run_cases(
    cases: Sequence[ProofCase],
    faults: Sequence[InjectedFault | None] = (),
    *,
    on_outcome: OnOutcome | None = None,
    time_out_s: float = TIME_OUT_S,
) -> list[Outcome]:
    """Run cases and return their outcomes in order; cases of one subject share its reference.

    ``faults``: the fault to inject into each case, or nothing.
    """
    outcomes: dict[int, Outcome] = {}

    def record(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        if on_outcome is not None:
            on_outcome(number, outcome)

    with scratch_folder("proof") as folder:
        references: dict[Subject, str] = {}
        for case in cases:
            references.setdefault(case.subject, str(folder / f"{len(references)}.safetensors"))
        tasks = {}
        # Cases on most ranks first.
        for number in sorted(range(len(cases)), key=lambda number: -cases[number].world):
            case = cases[number]
            fault = faults[number] if faults else None
            tasks[number] = CaseTask(case, references[case.subject], fault)
        while len(outcomes) < len(cases):
            remaining = {number: task for number, task in tasks.items() if number not in outcomes}
            error = _run(remaining, record, time_out_s)
            if error is not None:  # of the case that it names, else of the first remaining one
                named = (int(n) for n in re.findall(rf"{CaseFailed.__name__}: (\d+)", error))
                failed = next(n for n in (*named, *remaining) if n not in outcomes)
                record(failed, Outcome(problems=(error,)))
            assert error is not None or len(outcomes) == len(cases), "ranks ended without an error"
    return [outcomes[number] for number in range(len(cases))]


def _run(tasks: dict[int, CaseTask], record: OnOutcome, time_out_s: float) -> str | None:
    """Run tasks until one fails; return the error, or None."""
    receiver, sender = Pipe(duplex=False)
    cases = [task.case for task in tasks.values()]
    ranks = max(case.world for case in cases)
    arguments = list(tasks.items()), sender, time_out_s
    records = [(case.layout, case.subject.decoder) for case in cases]
    fork_server(__name__, *modules_to_preload(records))
    failed: list[str] = []

    def start() -> None:
        try:
            launch(_rank_main, ranks, *arguments, time_out_s=time_out_s)
        except Exception as error:
            failed.append(str(error))
        finally:
            sender.close()

    # In a thread, so a signal can end the main thread and the ranks with it.
    launcher = threading.Thread(target=start, daemon=True)
    launcher.start()
    while True:
        try:
            record(*receiver.recv())
        except (EOFError, OSError):
            break
    launcher.join()
    return failed[0] if failed else None


# --------------------------------------------------------------------------------- on each rank


def _rank_main(
    info: RankInfo, tasks: list[tuple[int, CaseTask]], outcomes: Connection, time_out_s: float
) -> None:
    """Run every task in which this rank takes part."""
    with World.open(Folding(Sizes(), info.world_size), "cpu", time_out_s) as world:
        subjects = {Path(task.reference): (number, task.case.subject) for number, task in tasks}
        for index, (path, (number, subject)) in enumerate(subjects.items()):
            if index % info.world_size == info.rank and not path.exists():
                with _naming_case(number):
                    write_reference(path, *run_reference(subject))
        gather_objects("references are there", world.on_host)
    for number, task in tasks:
        case = task.case
        if info.rank >= case.world:
            continue
        started = time.perf_counter()
        with _naming_case(number):
            if case.world > 1:
                join(info._replace(world_size=case.world, meeting=number + 1), time_out_s)
            with World.open(case.folding, "cpu", time_out_s) as world:
                facts = read_facts(Path(task.reference))
                drawn = replace(case, subject=replace(case.subject, seed=facts["seed"]))
                comparison = compare_rank(Path(task.reference), run_rank(drawn, world, task.fault))
                comparisons = gather_objects(comparison, world.on_host)
        if info.rank == 0:
            outcome = combine_ranks(facts, comparisons)
            outcome.seconds = time.perf_counter() - started
            outcomes.send((number, outcome))


@contextmanager
def _naming_case(number: int) -> Iterator[None]:
    """Add the case's number to errors in the context."""
    try:
        yield
    except Exception as error:
        raise CaseFailed(f"{number}: {type(error).__name__}: {error}") from error


def run_reference(subject: Subject) -> tuple[Subject, RankResult]:
    """Return the subject with the first seed without degenerate results, and these results.

    With few experts per token, an expert may get no token by chance. If the results of all seeds
    are degenerate, that is not chance: those of the first are returned, and the proof fails.
    """
    runs = []
    for seed in range(subject.seed, subject.seed + MAX_SEEDS):
        drawn = replace(subject, seed=seed)
        runs.append((drawn, run_rank(ProofCase("one rank", drawn, ONE_RANK, 1), World.single())))
        if not find_degenerate(*runs[-1]):
            return runs[-1]
    return runs[0]
