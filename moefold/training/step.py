"""One optimizer step: micro-batches forward and backward, the checks, the update.

T rows, D hidden. The loss of a step is the summed cross-entropy of its valid labels over their
global count, plus each router term weighted by its micro-batch's share of the step's valid rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow
from moefold.layers.loss import loss_and_gradients
from moefold.moe.balance import sum_counters
from moefold.optim.norm import read_scalars, widest
from moefold.parallel.apply import ModelParts, flow_of
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.limits import (
    check_even_rows,
    enough_room,
    missing_room,
    no_room,
    repeats,
)
from moefold.parallel.pipeline.executor import Executor, Factors, StepResult


@dataclass(frozen=True)
class StepFigures:
    """What one forward and backward of a whole batch gave, read from the device once."""

    lm_loss: float
    """Mean cross-entropy over the step's labels, in nats."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    router_terms: dict[str, float]
    """Each balancing term, averaged over layers and over the step's valid rows."""
    tokens: int
    """Valid rows."""
    stop: bool = False
    """Whether some rank was asked to end the run."""
    needed_rows: int = 0
    """``max_rows`` that dispatch lacked, so that the step was made again by all-to-all; else 0."""

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        figures = (self.lm_loss, self.grad_norm, *self.router_terms.values())
        return all(abs(f) < float("inf") for f in figures)


def gradients(
    data: ShardedState,
    batches: Sequence[MicroBatch],
    loss_chunk: int,
    stop: bool = False,
    executor: Callable[..., Executor] | None = None,
) -> StepFigures:
    """Compute the gradients of the step's loss; every trained parameter gets one.

    A step in which rows lacked a dispatcher's stated room is made once more without such a bound.

    Args:
        data: the model's parts on this rank; their gradients are dropped first.
        batches: the micro-batches of this data rank, whole, in order; others have as many.
        loss_chunk: rows whose logits exist at once.
        stop: whether this rank was asked to end the run; all hear of it.
        executor: makes what runs this rank's line of the schedule.

    Raises:
        ValueError: where rows lacked room and the layout wants that to end the run.
    """
    placed = data.placed
    with placed.world.recorder.module("step"):
        totals = _totals(batches, placed.world)
        check_even_rows(placed, batches)
    figures, missing = _pass(data, batches, totals, loss_chunk, stop, executor)
    if missing is None:
        return figures
    needed = enough_room(placed, missing)
    if not repeats(placed):
        raise no_room(placed, needed)
    exact, _ = _pass(data, batches, totals, loss_chunk, stop, executor, exact=True)
    return replace(exact, needed_rows=needed)


def _pass(
    data: ShardedState,
    batches: Sequence[MicroBatch],
    totals: "_Totals",
    loss_chunk: int,
    stop: bool,
    executor: Callable[..., Executor] | None,
    exact: bool = False,
) -> tuple[StepFigures, Tensor | None]:
    """Run forward and backward of all micro-batches, from gradients and counters of zero.

    Returns the figures, and the rows for which this rank lacked room, where any rank did.
    """
    placed = data.placed
    model, world = placed.model, placed.world
    module = world.recorder.module
    data.begin_step(len(batches))
    for _, mixture in model.mixtures():
        mixture.balance.start_step()

    def loss(x_TD: Tensor, flow: Flow, scale: Tensor) -> tuple[Tensor, Tensor]:
        head = model.head_operand()
        with module("loss"):
            return loss_and_gradients(x_TD, head, flow, scale=scale, chunk=loss_chunk)

    flows = [flow_of(placed, batch, exact=exact) for batch in batches]
    with module("pipeline"):
        ran = (executor or Executor)(placed, flows, totals.factors, loss).run()
    with module("gradients"):
        norm_squared = data.finish()
    with module("counters"):
        sum_counters([mixture.balance for _, mixture in model.mixtures()], world.group("stage"))
    missing = missing_room(placed, [count for flow in flows for count in flow.overflow])
    with module("figures"):
        return _figures(placed, ran, totals, norm_squared, stop, missing)


class _Totals(NamedTuple):
    """A step's counts over all data ranks. They stay on the device: none is waited for."""

    counts: Tensor
    """int64 labels and valid rows."""
    factors: Factors


def _totals(batches: Sequence[MicroBatch], world: World) -> _Totals:
    """Sum the data ranks' counts of their micro-batches."""
    here = [sum(b.n_labels for b in batches), *(b.population for b in batches)]
    pinned = world.device.type == "cuda"  # or the host would wait for the copy
    said = torch.tensor(here, pin_memory=pinned).to(world.device, non_blocking=True)
    counts = sum_(torch.stack([said[0], said[1:].sum()]), world.group("dp"))
    wide = counts.clamp(min=1).to(widest(world.device))
    return _Totals(counts, Factors(wide[0].reciprocal(), said[1:] / wide[1]))


def _figures(
    placed: ModelParts,
    ran: StepResult,
    totals: _Totals,
    norm_squared: Tensor,
    stop: bool,
    missing: Tensor | None,
) -> tuple[StepFigures, Tensor | None]:
    """Add up every rank's share of the figures, and read them from the device once."""
    mixtures, names = dict(placed.model.mixtures()), list(placed.term_layers)
    values = norm_squared.new_zeros(3 + len(names) + (missing is not None))
    values[0] = norm_squared
    values[-1].fill_(stop)  # assigned, the number would be waited for
    if missing is not None:
        values[-2] = missing > 0
    if ran.losses:
        values[1] = torch.stack(ran.losses).sum()
    share_M = totals.factors.share_M.unbind()
    for at, name in enumerate(names, 2):
        found = [
            (terms_N[list(mixtures[layer].terms).index(name)], share_M[micro])
            for micro, layer, terms_N in ran.terms
            if name in mixtures[layer].terms
        ]
        if found:
            terms, shares = (torch.stack(part) for part in zip(*found, strict=True))
            values[at] = (terms * shares).sum() / placed.term_layers[name]
    summed = sum_(values, placed.world.group("world"))
    said = read_scalars(*summed.unbind(), *totals.counts.unbind())
    squared, loss, *terms, stops, labels, tokens = said
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=False))  # Whether rows lacked room comes last.
    figures = StepFigures(loss / max(labels, 1), norm, by_name, round(tokens), stops > 0)
    return figures, missing if missing is not None and terms[-1] > 0 else None
