"""Policy for steps whose loss or gradient is not finite, decided before the update.

Every rank decides alike, from figures that are the same on all; the report has what each holds.
A replay tells data from machine: the same weights, rows and order of sums give the same bits
(``deterministic: true`` makes kernels so on CUDA). Where all do, the data or the model made the
fault; where a rank's gradients differ, that rank's machine did.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects
from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.optim.norm import non_finite
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.quantised import narrow_weights
from moefold.training.config import Rewind, Skip, Stop
from moefold.training.state import Progress
from moefold.training.step import StepFigures

SHOWN = 8
ROLES = {"weight": "the weight", "rows": "rows at", "gradient": "the gradient of rows at"}
"""What became codes, in words."""
MACHINE = "Replay: a machine fault"
DATA = "Replay: a fault of the data or the model"
StepAction = Literal["update", "skip", "rewind"]
"""What to do with a step."""


class NonFiniteStep(ValueError):
    """A step gave NaN or infinity; the weights are those before it."""


def decide(
    policy: Record,
    progress: Progress,
    figures: StepFigures,
    batches: Sequence[MicroBatch],
    data: ShardedState,
    again: Callable[[], Any],
) -> StepAction:
    """Return what to do with a step that gave ``figures``, by ``train.on_nonfinite``.

    Every rank asks. Strikes are counted in ``progress``, how far the run is before it. ``data`` has
    its gradients; ``again`` computes them once more, from the same ``batches`` and weights.

    Raises:
        NonFiniteStep: with the report, where the policy stops.
    """
    if figures.finite:
        # Steps made again after a rewind prove nothing: only getting past the bad one does.
        if progress.step >= progress.struck_at:
            progress.strikes = 0
        return "update"
    assert isinstance(policy, Stop | Skip | Rewind)
    progress.strikes, progress.struck_at = progress.strikes + 1, progress.step
    holders = _holders(batches, data)
    told = replay(data, again) if policy.replay else ""
    used_up = isinstance(policy, Stop) or progress.strikes > policy.limit
    if not (used_up or told.startswith(MACHINE)):
        return "skip" if isinstance(policy, Skip) else "rewind"
    holders = "\n".join([holders, *blame(data, again)])
    limit = "" if isinstance(policy, Stop) else f" (its limit of {policy.limit} is used up)"
    raise NonFiniteStep(
        f"step {progress.step + 1} is not finite (loss {figures.lm_loss}, gradient norm "
        f"{figures.grad_norm}, router terms {figures.router_terms or 'none'}); nothing was "
        f"updated.\n{holders}\nPlace in the data's order: {progress.place()}\n"
        + (f"{told}\n" if told else "")
        + "Mend the cause, lower optim.lr, or set train.on_nonfinite to skip or rewind"
        + limit * used_up
    )


def _holders(batches: Sequence[MicroBatch], data: ShardedState) -> str:
    """Name the gradients that are not finite, their ranks, and the documents of all data ranks."""
    world = data.placed.world
    grads = {n: p.grad for n, p in data.params.items() if p.grad is not None}
    documents = [f"{o.name} {o.document}" for batch in batches for o in batch.sources]
    said = gather_objects({"grads": non_finite(grads), "documents": documents}, world.on_host)
    lines = []
    for rank, each in enumerate(said):
        if names := each["grads"]:
            where = f" on rank {rank}" if len(said) > 1 else ""
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"Gradients not finite{where}: {', '.join(names[:SHOWN])}{more}")
    named = dict.fromkeys(name for each in said for name in each["documents"])
    lines = lines or ["Gradients not finite: none"]
    return "\n".join([*lines, f"documents: {', '.join(named) or 'unknown'}"])


def blame(data: ShardedState, again: Callable[[], Any]) -> list[str]:
    """Compute a step's gradients again; say what first became codes on each rank and is not finite.

    Every rank calls it. Nothing is said where no products read codes.
    """
    model, world = data.placed.model, data.placed.world
    names = {number: name for name, number in narrow_weights(model.record).items()}
    if not names:
        return []
    model.recipe.noted = noted = []
    try:
        again()
    finally:
        model.recipe.noted = None
    lines = []
    for rank, each in enumerate(gather_objects(noted[:1], world.on_host)):
        where = f" on rank {rank}" if world.size > 1 else ""
        for number, role, expert in each:
            of = "" if expert is None else f", expert {expert}"
            lines.append(f"First codes not finite{where}: {ROLES[role]} {names[number]}{of}")
    return lines


def replay(data: ShardedState, again: Callable[[], Any]) -> str:
    """Compute a step's gradients, which ``data`` holds, again; say what that tells.

    Every rank calls it.
    """
    before = digest(held.tensor for held in data.gradients())
    again()
    after = digest(held.tensor for held in data.gradients())
    said = gather_objects(before != after, data.placed.world.on_host)
    ranks = ", ".join(str(rank) for rank, differs in enumerate(said) if differs)
    if not ranks:
        return f"{DATA}: all ranks computed the same bits again"
    return (
        f"{MACHINE}: rank {ranks} got other bits from the same weights and data. What one "
        "computes reaches others: test the hardware of all that are named, then go on from the "
        "newest checkpoint"
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a SHA-256 of the tensors' bytes."""
    found = sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
