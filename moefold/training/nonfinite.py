"""Policy for steps whose loss or gradient is not finite, or too large, applied before the update.

A skipped step changes neither weights nor optimizer state, selection bias or place in the
learning-rate schedule; its data have been read. All ranks decide alike, from metrics that are equal
on all; the report lists what each rank holds. A replay distinguishes faults of data and of
hardware: equal weights, rows and order of sums give equal bits (on CUDA with
``deterministic: true``). If the gradients of all ranks are reproduced, the data or the model is at
fault; if those of a rank differ, its machine is.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects
from moefold.data.batch import MicroBatch
from moefold.optim.norm import non_finite
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.quantised import quantised_weight_names
from moefold.training.config import Rewind, Skip, SkipNorm, Stop, Train
from moefold.training.figures import StepFigures
from moefold.training.state import Progress

MAX_SHOWN = 8
ROLES = {"weight": "weight", "rows": "input of", "gradient": "output gradient of"}
"""Names of the operands that were quantised, by role."""
MACHINE_FAULT = "Replay: a machine fault"


class NonFiniteStep(ValueError):
    """A step produced NaN or infinity; the weights were not updated."""


class LargeGradients(ValueError):
    """More consecutive steps than allowed had a gradient norm above ``train.skip_norm``."""


def decide_update(
    train: Train,
    progress: Progress,
    figures: StepFigures,
    batches: Sequence[MicroBatch],
    state: ShardedState,
    recompute: Callable[[], Any],
) -> Literal["update", "skip", "rewind"]:
    """Return what to do with a step, by ``train.on_nonfinite`` and ``train.skip_norm``.

    All ranks call it, with the step's ``figures``. Strikes are counted in ``progress``, that before
    the step. ``state`` holds its gradients; ``recompute`` recomputes them from the same
    ``batches`` and weights.

    Raises:
        NonFiniteStep: with the report, if the policy is to stop.
        LargeGradients: if too many consecutive steps were skipped.
    """
    policy = train.on_nonfinite
    bound = train.skip_norm
    is_large = bound is not None and figures.grad_norm > bound.above
    if figures.finite and not is_large:
        # Steps repeated after a rewind do not reset strikes: only passing the offending one does.
        if progress.step >= progress.struck_at:
            progress.strikes = 0
        return "update"
    assert isinstance(policy, Stop | Skip | Rewind)
    progress.strikes = progress.strikes + 1
    progress.struck_at = progress.step
    if figures.finite:
        assert bound is not None
        if progress.strikes > bound.limit:
            raise LargeGradients(_large_message(progress, figures, bound))
        return "skip"
    description = _describe_nonfinite(batches, state)
    verdict = replay(state, recompute) if policy.replay else ""
    must_stop = isinstance(policy, Stop) or progress.strikes > policy.limit
    if not (must_stop or verdict.startswith(MACHINE_FAULT)):
        return "skip" if isinstance(policy, Skip) else "rewind"
    description = "\n".join([description, *find_nonfinite_operands(state, recompute)])
    remedy = "; or set train.on_nonfinite to skip or rewind"
    if not isinstance(policy, Stop):
        remedy = f"; or raise train.on_nonfinite.limit, as the limit of {policy.limit} is used up"
    raise NonFiniteStep(
        f"step {progress.step + 1} is not finite (loss {figures.lm_loss}, gradient norm "
        f"{figures.grad_norm}, router terms {figures.router_terms or 'none'}); nothing was "
        f"updated.\n{description}\nPosition in the data order: {progress.next_batch_index()}\n"
        + (f"{verdict}\n" if verdict else "")
        + "Remove the cause or lower optim.lr"
        + remedy * must_stop
    )


def _large_message(progress: Progress, figures: StepFigures, bound: SkipNorm) -> str:
    return (
        f"step {progress.step + 1} has a gradient norm of {figures.grad_norm:.4g}, above "
        f"train.skip_norm.above ({bound.above:g}), as had the {bound.limit} steps before it, which "
        "were skipped; nothing was updated. Raise train.skip_norm.above or its limit, or lower "
        "optim.lr and resume from an earlier checkpoint"
    )


def _describe_nonfinite(batches: Sequence[MicroBatch], state: ShardedState) -> str:
    """List the gradients that are not finite, by rank, and the documents of all data ranks."""
    world = state.parts.world
    grads = {n: p.grad for n, p in state.params.items() if p.grad is not None}
    documents = [f"{o.name} {o.document}" for batch in batches for o in batch.sources]
    by_rank = gather_objects({"grads": non_finite(grads), "documents": documents}, world.on_host)
    lines = []
    for rank, report in enumerate(by_rank):
        if names := report["grads"]:
            where = f" on rank {rank}" if len(by_rank) > 1 else ""
            shown = ", ".join(names[:MAX_SHOWN])
            if len(names) > MAX_SHOWN:
                shown += f" and {len(names) - MAX_SHOWN} more"
            lines.append(f"Gradients not finite{where}: {shown}")
    lines = lines or ["Gradients not finite: none"]
    documents = list(dict.fromkeys(name for report in by_rank for name in report["documents"]))
    lines.append(f"Documents of the step: {', '.join(documents) or 'unknown'}")
    return "\n".join(lines)


def find_nonfinite_operands(state: ShardedState, recompute: Callable[[], Any]) -> list[str]:
    """Recompute a step's gradients; name each rank's first non-finite operand that was quantised.

    All ranks call it. Without quantised products the list is empty.
    """
    model = state.parts.model
    world = state.parts.world
    names = {number: name for name, number in quantised_weight_names(model.record).items()}
    if not names:
        return []
    model.precision_policy.non_finite_operands = operands = []
    try:
        recompute()
    finally:
        model.precision_policy.non_finite_operands = None
    lines = []
    for rank, first in enumerate(gather_objects(operands[:1], world.on_host)):
        where = f" on rank {rank}" if world.size > 1 else ""
        for number, role, expert in first:
            operand = names[number]
            if expert is not None:
                operand += f", expert {expert}"
            lines.append(f"First non-finite operand{where}: {ROLES[role]} {operand}")
    return lines


def replay(state: ShardedState, recompute: Callable[[], Any]) -> str:
    """Recompute the gradients in ``state`` on all ranks; say whether their bits are the same."""
    before = digest_bytes(part.tensor for part in state.gradients())
    recompute()
    after = digest_bytes(part.tensor for part in state.gradients())
    differing = gather_objects(before != after, state.parts.world.on_host)
    ranks = ", ".join(str(rank) for rank, differs in enumerate(differing) if differs)
    if not ranks:
        return "Replay: a fault of the data or the model: all ranks computed the same bits again"
    return (
        f"{MACHINE_FAULT}: rank {ranks} got different bits from the same weights and data. An "
        "error spreads to other ranks: test the hardware of all ranks named, then resume from the "
        "newest checkpoint"
    )


def digest_bytes(tensors: Iterable[Tensor]) -> str:
    """Return a SHA-256 of the tensors' bytes."""
    sha = sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
