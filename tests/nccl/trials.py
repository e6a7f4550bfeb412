"""The package's own code on ranks under NCCL's rules: what each trial runs, and where."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.lock import FolderLock
from moefold.comm import world as comm_world
from moefold.comm.agree import require_same, run_on_first
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.schedule.config import SCHEDULE, Schedule
from moefold.training import step
from moefold.training.distributed import RankZeroRunner
from moefold.training.evaluate import evaluate
from moefold.training.saving import Saver
from tests.gloo import dispatching
from tests.gloo.pipelines import Case, alone, batches
from tests.gloo.test_checkpoint_together import boxes
from tests.nccl.rules import Machine, nccl

TIME_OUT_S = 30.0


class Trial(NamedTuple):
    """Some ranks and what they do."""

    name: str
    ranks: int
    run: Callable[..., Any]
    """Called with a rank and ``args``."""
    args: tuple[Any, ...]
    device: str = "cpu"


def tried(trial: Trial) -> Machine:
    """Run a trial; returns what its ranks left behind.

    Raises:
        Hang: where they wait for each other.
    """
    with nccl(trial.ranks, trial.device) as machine:
        machine.run(trial.run, *trial.args)
    return machine


def open_world(sizes: str, device: str = "cpu") -> World:
    """Open a layout on this rank, among as many as the model has."""
    folding = Folding(Sizes.parse(sizes), comm_world.dist.get_world_size())
    return World.open(folding, device, TIME_OUT_S)


def start(rank: int, sizes: str, device: str) -> None:
    """Open a layout and close it."""
    open_world(sizes, device).close()


def train(rank: int, case: Case) -> float:
    """Make one step's gradients and a held-out loss; return the error against one rank."""
    world = open_world(case.sizes)
    data = case.data(world)
    whole = batches(case.micro_batches * world.folding.dp)
    mine = whole[world.attention.dp :: world.folding.dp]
    figures = step.gradients(data, mine, 16)
    expected, gradients = alone(case.model, len(whole))
    errors = [abs(figures.grad_norm / expected.grad_norm - 1)]
    for held in data.gradients():
        piece = gradients[held.name][tuple(slice(start, end) for start, end in held.box)]
        errors.append(float((held.tensor - piece).norm() / gradients[held.name].norm()))
    evaluate(data.parts, mine, 16)
    assert max(errors) < 1e-10, f"rank {rank}: {max(errors)}"
    return max(errors)


def dispatch(rank: int, way: str, sizes: str) -> None:
    """Send rows to experts and back, and their gradients; compare with one rank's."""
    world = open_world(sizes)
    weights = dispatching.here(world, *dispatching.expert_weights())
    for case in ("even", "dropped", "idle"):
        rows = dispatching.routed(case, rank)
        ours = dispatching.there_and_back(dispatching.WAYS[way], rows, *weights, world)
        assert dispatching.gap(ours, dispatching.expected(case, world)) < 1e-12, case


def agree(rank: int, sizes: str) -> None:
    """Speak as jobs do: facts, the first rank's word, hooks that ask for what all do."""
    world = open_world(sizes, "meta")
    require_same({"seed": 1}, world.on_host)
    assert run_on_first(lambda: "word", world.on_host) == "word"
    runner = RankZeroRunner(world, job := Noted())
    said = runner.lead(lambda: runner.call(Noted.save, "a"), lambda: "answer")
    assert (said, job.done) == ("answer", ["a"])


class Noted:
    """A job whose saves are noted."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def save(self, name: str) -> None:
        self.done.append(name)


def save(rank: int, sizes: str, folder: str) -> None:
    """Save from all ranks twice, while they wait and behind them, and find the newest again."""
    world, where = open_world(sizes, "meta"), Path(folder)
    lock = FolderLock(where, "a trial")
    run_on_first(lambda: lock.acquire() and None, world.on_host)
    for number, asynchronous in ((1, False), (2, True)):
        policy = CheckpointPolicy(keep=1, asynchronous=asynchronous, attempts=1)
        saver = Saver(where, policy, lock, world)
        saver.save(number, boxes(number, rank, world.size), {"step": number})
        saver.poll()
        saver.wait()
        found = run_on_first(lambda: str(find_newest(where)), world.on_host)
        assert found.endswith(f"{number}"), found
    run_on_first(lock.release, world.on_host)


STAGES = {
    (3, 2): "E|t|t|t|t|L",
    (4, 2): "E|t||t|t||t|L",
}
"""Where four layers stand on more stages, by ranks and chunks."""


def schedules() -> list[Trial]:
    """Every schedule on two, three and four stages, with one chunk or two as it has them."""
    trials = []
    for kind, p, v in product(sorted(SCHEDULE.kinds), (2, 3, 4), (1, 2)):
        record = SCHEDULE.kinds[kind]()
        assert isinstance(record, Schedule)
        if not list(record.violations(p, v, 2 * p)):
            layout = {"stages": STAGES[p, v]} if (p, v) in STAGES else {}
            case = Case(f"pp{p}" + " vpp2" * (v == 2), kind, "tied", 2 * p, layout)
            trials.append(Trial(f"{case.sizes} {kind}", p, train, (case,)))
    return trials


def layouts() -> list[Trial]:
    """Every axis beside a pipeline and without one, shared weights, and attention over rows."""
    ring, ulysses = ({"context": kind} for kind in ("ring", "all_to_all"))
    cases = (
        (8, Case("tp2 pp2 ep2", "1f1b", "tied", 4)),
        (8, Case("tp2 pp2 ep2", "merged", "deep", 4, {"zero": 3})),
        (4, Case("pp2 vpp2 ep2", "dualpipe_v", "tied", 4)),
        (4, Case("cp2 ep4", "gpipe", "deep", 2, ring)),
        (4, Case("cp2 pp2 ep2", "1f1b", "deep", 4, ulysses)),
        (4, Case("tp2 ep4", "gpipe", "mla", 2, {"zero": 2})),
    )
    return [
        Trial(f"{c.sizes} {c.schedule} {' '.join(map(str, c.layout.values()))}", n, train, (c,))
        for n, c in cases
    ]


def others() -> list[Trial]:
    """What is no step: dispatchers on their own, words, checkpoints, opening alone."""
    opened = (("pp2", 2), ("pp3", 3), ("pp4", 4), ("tp2 pp2 ep2", 8), ("cp2 pp2 ep4", 8))
    return [
        *(Trial(f"{s} opened", n, start, (s, "meta"), "meta") for s, n in opened),
        *(Trial(f"ep4 {way}", 4, dispatch, (way, "ep4")) for way in dispatching.WAYS),
        *(Trial(f"ep2 etp2 {w}", 4, dispatch, (w, "ep2 etp2")) for w in ("alltoall", "allgather")),
        Trial("tp2 pp2 words", 4, agree, ("tp2 pp2",), "meta"),
    ]
