"""Checkpoints of one layout in all others: saved once per layout, loaded in each, trained on.

``python -m tests.gloo.resharding`` makes every ordered pair of layouts for every optimizer.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.folder import step_name
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import save
from moefold.comm.collectives import gather_objects
from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch_all
from moefold.comm.rendezvous import join
from moefold.comm.world import World
from moefold.kernels.quantise.config import Fp8Tensor
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.optim.config import OPTIMIZER, AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.proof.case import ProofCase, Subject
from moefold.proof.rank_run import initialise_model, micro_batches
from moefold.proof.shrink import small_optimizer
from moefold.proof.subjects import BIASED, DENSE, MLA, SHARED, WINDOWED, decoder
from moefold.training.state import Progress, assigned_state, iter_state, restore
from moefold.training.step import gradients
from tests.cpu.checkpoint_tools import bits, quick_folder
from tests.gloo.harness import one_at_a_time

BOUND = 1e-10
FLOOR = 1e-6
BEFORE, AFTER = 2, 1
"""Steps up to the save, and behind it."""
LOSS_CHUNK = 16
TIME_OUT_S = 300.0
SMALL_SHARDS = CheckpointPolicy(shard_bytes=8192)

LAYOUTS = (
    ("", 1, 0),
    ("", 2, 1),
    ("", 4, 3),
    ("tp2", 2, 0),
    ("tp2", 4, 1),
    ("tp4", 4, 0),
    ("cp2", 2, 2),
    ("tp2 cp2", 4, 3),
    ("cp4", 8, 1),
    ("pp2", 2, 0),
    ("pp2", 4, 2),
    ("pp3", 3, 0),
    ("pp3 tp2", 6, 0),
    ("pp3", 6, 3),
    ("pp4", 4, 1),
    ("pp2 vpp2", 2, 1),
    ("pp2 vpp2", 4, 3),
    ("ep2", 2, 0),
    ("ep4", 4, 1),
    ("etp2", 2, 2),
    ("ep2 etp2", 4, 3),
    ("tp2 ep8", 8, 2),
    ("tp2 ep4 etp2", 8, 1),
    ("cp2 ep4", 8, 3),
    ("pp2 cp2 tp2 ep2", 8, 2),
    ("pp2 tp2 vpp2 ep2 etp2", 8, 1),
)
"""Sizes, ranks and ZeRO stage."""
OPTIMIZERS = {kind: record() for kind, record in OPTIMIZER.kinds.items()}
OPTIMIZERS["adamw fp8"] = AdamW(moments="fp8", moment_group=4)
SELECTED = {
    "adamw": (0, 16, 19),
    "muon": (1, 11),
    "sgd": (0, 16),
    "lion": (1, 11),
    "adamw fp8": (0, 4, 13, 20),
}
"""Those between which the tests load, by optimizer."""
Place = tuple[str, int, int]

MODELS = {
    "tied": decoder(WINDOWED, DENSE, SHARED, BIASED, SHARED, tied=True, vocab=67),
    "latent": decoder(MLA, DENSE, BIASED, SHARED, BIASED),
}


def subject_of(model: str, kind: str) -> Subject:
    """Return what is trained: four blocks and one of the optimizers; histories beside fp8."""
    optim, made = small_optimizer(OPTIMIZERS[kind]), MODELS[model]
    if kind == "adamw fp8":
        delayed = Fp8Tensor(scaling="delayed", history=3)
        made = made.model_copy(update={"quantise": delayed})
    return Subject(made, optim, micro_batches=4, rows=16, padding=3)


@dataclass(frozen=True)
class Task:
    """What the ranks do: between which layouts, on what, and where its files lie."""

    subject: Subject
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    folder: str


def words(place: Place) -> str:
    """Name a layout."""
    sizes, world, zero = place
    return f"{sizes or 'dp'} on {world}, zero {zero}"


def case_of(subject: Subject, place: Place) -> ProofCase:
    """Return the subject in a layout; it must be legal."""
    sizes, world, zero = place
    case = ProofCase(words(place), subject, Layout(sizes=sizes, zero=zero), world)
    assert not list(case.broken_rules()), (words(place), list(case.broken_rules()))
    return case


class Here:
    """A subject in a layout on this rank: its parts, and steps."""

    def __init__(self, case: ProofCase, world: World) -> None:
        self.world, subject = world, case.subject
        parts = build_parts(subject.decoder, "fp64", case.layout, world)
        initialise_model(parts.model, subject, parts.shards)
        self.batches = micro_batches(subject)[world.attention.dp :: world.folding.dp]
        self.state = ShardedState(parts)
        self.optimizer = self.state.optimizer(subject.optim)
        self.clip_norm = subject.optim.clip_norm  # type: ignore[attr-defined]

    def step(self) -> list[float]:
        """Make a step; return its loss and norm."""
        figures = gradients(self.state, self.batches, LOSS_CHUNK)
        self.optimizer.step(clip_scale(figures.grad_norm, self.clip_norm))
        self.state.end_step()
        return [figures.lm_loss, figures.grad_norm, *figures.router_terms.values()]

    def wait(self) -> None:
        """Wait for the other ranks."""
        gather_objects(0, self.world.group("world"))

    def save(self, folder: Path) -> Path:
        """Write a checkpoint."""
        meta = {"progress": {"step": BEFORE, "tokens": 7, "excluded": [1]}}
        what = folder, BEFORE, assigned_state(self.state, self.optimizer), meta, SMALL_SHARDS
        if self.world.size == 1:
            return save(*what)
        ranks, lock = self.world.group("world"), FolderLock(folder, "the test")
        if ranks.index == 0:
            folder.mkdir()
            lock.acquire()
        try:
            return save(*what, lock=lock, ranks=ranks)
        finally:
            if ranks.index == 0:
                lock.release()


# ------------------------------------------------------------------- the state, beside checkpoints


def dump(here: Here, path: Path) -> None:
    """Write the whole state as one file, without any of the checkpoint's code: the truth.

    Every rank writes what it holds; the first one puts it together, and finds that all elements
    are there and that copies agree in each bit.
    """
    mine = [(name, held) for name, held in iter_state(here.state, here.optimizer)]
    tensors = {f"{i}": held.tensor.detach().clone() for i, (_, held) in enumerate(mine)}
    facts = [[name, held.shape, held.box] for name, held in mine]
    part = path.with_name(f"{path.name}.{here.world.rank}")
    save_file(tensors, part, {"facts": json.dumps(facts)})
    here.wait()
    if here.world.rank == 0:
        assemble([path.with_name(f"{path.name}.{r}") for r in range(here.world.size)], path)
    here.wait()


def assemble(parts: Sequence[Path], path: Path) -> None:
    """Put together what ranks wrote."""
    whole: dict[str, torch.Tensor] = {}
    there: dict[str, torch.Tensor] = {}
    for part in parts:
        with safe_open(part, "pt") as file:
            for i, (name, shape, box) in enumerate(json.loads(file.metadata()["facts"])):
                values = file.get_tensor(f"{i}")
                if name not in whole:
                    whole[name] = torch.empty(shape, dtype=values.dtype)
                    there[name] = torch.zeros(shape, dtype=torch.bool)
                place = tuple(slice(*ends) for ends in box)
                seen = there[name][place]
                assert torch.equal(whole[name][place][seen], values[seen]), f"copies of {name}"
                whole[name][place] = values
                there[name][place] = True
        part.unlink()
    missing = [name for name, held in there.items() if not held.all()]
    assert not missing, f"elements of {missing} are on no rank"
    save_file(whole, path)


def wreck(here: Here) -> None:
    """Overwrite all of the state, so that nothing in it is right by chance."""
    for _, held in iter_state(here.state, here.optimizer):
        held.tensor.fill_(math.nan if held.tensor.is_floating_point() else 99)
    here.state.refresh_weights()


def unequal(here: Here, truth: Path) -> Iterator[str]:
    """Yield what of the state here is not, bit for bit, the truth's."""
    with safe_open(truth, "pt") as file:
        for name, held in iter_state(here.state, here.optimizer):
            if bits(held.tensor) != bits(_cut(file, name, held.box)):
                yield f"{name} {held.box} differs in its bits"


def far(here: Here, reference: Path) -> Iterator[str]:
    """Yield what of the state here is not near the reference's."""
    with safe_open(reference, "pt") as file:
        whole = {name: file.get_tensor(name).double() for name in file.keys()}  # noqa: SIM118
    total = math.sqrt(sum(float(t.square().sum()) for t in whole.values()))
    elements = sum(t.numel() for t in whole.values())
    for name, held in iter_state(here.state, here.optimizer):
        mine, truth = held.tensor.double(), whole[name]
        theirs = truth[tuple(slice(*ends) for ends in held.box)]
        least = FLOOR * total * math.sqrt(truth.numel() / elements)
        error = float((mine - theirs).norm()) / max(float(truth.norm()), least)
        if not error <= BOUND:
            yield f"{name} {held.box} is {error:.1e} off after {AFTER} more"


def _cut(file: Any, name: str, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    place = tuple(slice(*ends) for ends in box)
    return file.get_slice(name)[place] if place else file.get_tensor(name)


# --------------------------------------------------------------------------------- on each rank


def work(info: RankInfo, task: Task) -> list[str]:
    """Save in each source, load in each target; return what is wrong."""
    folder = Path(task.folder)
    with World.open(Folding(Sizes(), info.world_size), "cpu", TIME_OUT_S) as everyone:
        if info.rank == 0:
            make_reference(task.subject, folder)
        gather_objects(0, everyone.group("world"))
    attempts = iter(range(1, 1000))
    problems: list[str] = []
    for place in _widest_first(task.sources):
        with_world(info, place, next(attempts), lambda w, p=place: save_in(task, p, w))
    for place in _widest_first(task.targets):
        found = with_world(info, place, next(attempts), lambda w, p=place: load_in(task, p, w))
        problems += found or []
    return problems


def _widest_first(places: Sequence[Place]) -> list[Place]:
    """Return layouts in the order in which no rank waits for those that work without it."""
    return sorted(places, key=lambda place: -place[1])


def with_world(info: RankInfo, place: Place, attempt: int, function: Callable[[World], Any]) -> Any:
    """Call a function on the ranks of a layout; None on the others."""
    sizes, ranks, _ = place
    if info.rank >= ranks:
        return None
    if ranks > 1:
        join(info._replace(world_size=ranks, meeting=attempt), TIME_OUT_S)
    with World.open(Folding(Sizes.parse(sizes), ranks), "cpu", TIME_OUT_S) as world:
        return function(world)


def make_reference(subject: Subject, folder: Path) -> None:
    """Train unbroken on one rank; write its figures and its state at the end."""
    here = Here(case_of(subject, ("", 1, 0)), World.single())
    figures = [here.step() for _ in range(BEFORE + AFTER)]
    (folder / "figures.json").write_text(json.dumps(figures[BEFORE:]))
    dump(here, folder / "reference")


def name_of(place: Place) -> str:
    """Return a layout's folder."""
    return words(place).replace(" ", "_").replace(",", "")


def save_in(task: Task, place: Place, world: World) -> None:
    """Train, and write the state as a checkpoint and as the truth."""
    folder = Path(task.folder) / name_of(place)
    here = Here(case_of(task.subject, place), world)
    for _ in range(BEFORE):
        here.step()
    path = here.save(folder)
    dump(here, folder / "truth")
    if world.rank == 0:
        with safe_open(folder / "truth", "pt") as file:
            assert manifest.read(path).tensors.keys() == set(file.keys())


def load_in(task: Task, place: Place, world: World) -> list[str]:
    """Load every source's checkpoint in a layout, compare, train on, compare."""
    folder, problems = Path(task.folder), []
    here = Here(case_of(task.subject, place), world)
    wanted = json.loads((folder / "figures.json").read_text())
    for source in task.sources:
        there = folder / name_of(source)
        wreck(here)
        progress = restore(there / step_name(BEFORE), here.state, here.optimizer)
        here.state.refresh_weights()
        found = list(unequal(here, there / "truth"))
        if progress != Progress(BEFORE, 7, (1,)):
            found.append(f"{progress} is not what was saved")
        for step in wanted:
            figures = here.step()
            pairs = zip(figures, step, strict=True)
            if not all(math.isclose(a, b, rel_tol=BOUND) for a, b in pairs):
                found.append(f"figures {figures}, unbroken {step}")
        found += far(here, folder / "reference")
        problems += [f"{words(source)} -> {words(place)}: {what}" for what in found]
    wrong = gather_objects(len(problems), world.group("world"))
    if world.rank == 0:
        line = f"  {len(task.sources)} layouts into {words(place)}: {sum(wrong)} wrong"
        print(line, flush=True)
    return problems


# ------------------------------------------------------------------------------------- from outside


def pairs_fail(
    model: str, kind: str, sources: Sequence[Place], targets: Sequence[Place], folder: Path
) -> list[str]:
    """Load every source in every target; return what is wrong on any rank."""
    world = max(ranks for _, ranks, _ in (*sources, *targets))
    with one_at_a_time(), quick_folder(folder) as quick:
        task = Task(subject_of(model, kind), tuple(sources), tuple(targets), str(quick))
        answers = launch_all(work, world, (task,), TIME_OUT_S)
    return [what for answer in answers for what in answer]


def main() -> int:
    """Make every ordered pair of layouts for every optimizer; return the exit status."""
    failed = 0
    for kind, model in zip(OPTIMIZERS, [*MODELS, *MODELS, *MODELS], strict=False):
        started = time.perf_counter()
        wrong = pairs_fail(model, kind, LAYOUTS, LAYOUTS, Path("."))
        seconds = time.perf_counter() - started
        print(
            f"{kind} on the {model} model: {len(LAYOUTS) ** 2} ordered pairs of {len(LAYOUTS)} "
            f"layouts, {len(wrong)} wrong, {seconds:.0f} s",
            flush=True,
        )
        print("\n".join(wrong[:40]))
        failed += bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
