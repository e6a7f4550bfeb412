"""One optimizer step: micro-batches forward and backward, the checks, the update.

T rows, D hidden. The loss of a step is the summed cross-entropy of its valid labels over their
global count, plus each router term weighted by its micro-batch's share of the step's valid rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow, cut
from moefold.layers.loss import loss_and_gradients
from moefold.layers.recompute import Recompute
from moefold.moe.balance import sum_counters
from moefold.optim.norm import read_scalars, widest
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.limits import check_even_rows, check_overflow
from moefold.parallel.pipeline.executor import Executor, StepResult
from moefold.parallel.pipeline.score import score


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

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        figures = (self.lm_loss, self.grad_norm, *self.router_terms.values())
        return all(abs(f) < float("inf") for f in figures)


def gradients(
    data: ShardedState, batches: Sequence[MicroBatch], loss_chunk: int, stop: bool = False
) -> StepFigures:
    """Compute the gradients of the step's loss; every trained parameter gets one.

    Args:
        data: the model's parts on this rank; their gradients are dropped first.
        batches: the micro-batches of this data rank, whole, in order; others have as many.
        loss_chunk: rows whose logits exist at once.
        stop: whether this rank was asked to end the run; all hear of it.
    """
    placed = data.placed
    model, world = placed.model, placed.world
    module = world.recorder.module
    with module("step"):
        totals = _totals(batches, world)
        check_even_rows(placed, batches)
    data.begin_step(len(batches))
    for _, mixture in model.mixtures():
        mixture.balance.start_step()

    def loss(x_TD: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
        head = model.head_operand()
        with module("loss"):
            return loss_and_gradients(x_TD, head, flow, scale=totals.scale, chunk=loss_chunk)

    flows = [flow_of(placed, batch) for batch in batches]
    with module("pipeline"):
        ran = Executor(placed, flows, totals.share_M.unbind(), loss).run()
    check_overflow(placed, [count for flow in flows for count in flow.overflow])
    with module("gradients"):
        norm_squared = data.finish()
    balances = [mixture.balance for _, mixture in model.mixtures()]
    with module("counters"):
        sum_counters(balances, world.group("stage"))
    with module("figures"):
        return _figures(placed, ran, totals, norm_squared, stop)


class _Totals(NamedTuple):
    """A step's counts over all data ranks. They stay on the device: none is waited for."""

    counts: Tensor
    """int64 labels and valid rows."""
    scale: Tensor
    """One over the labels, the factor of the loss."""
    share_M: Tensor
    """Each micro-batch's share of the step's valid rows."""


def _totals(batches: Sequence[MicroBatch], world: World) -> _Totals:
    """Sum the data ranks' counts of their micro-batches."""
    here = [sum(b.n_labels for b in batches), *(b.population for b in batches)]
    said = torch.tensor(here).to(world.device, non_blocking=True)
    rows_M = said[1:]
    counts = sum_(torch.stack([said[0], rows_M.sum()]), world.group("dp"))
    wide = counts.clamp(min=1).to(widest(world.device))
    return _Totals(counts, wide[0].reciprocal(), rows_M / wide[1])


def flow_of(placed: ModelParts, batch: MicroBatch, training: bool = True) -> Flow:
    """Return the pass of one micro-batch, which is whole and on the host, through these parts."""
    model, layout, world = placed.model, placed.layout, placed.world
    rows, piece = cut(batch, world)
    device = world.device
    return Flow(
        rows.to(device),
        model.recipe,
        recompute=Recompute(layout.recompute),
        training=training,
        world=world,
        context=layout.context,
        piece=None if piece is None else piece.to(device),
    )


def _figures(
    placed: ModelParts, ran: StepResult, totals: _Totals, norm_squared: Tensor, stop: bool
) -> StepFigures:
    """Add up every rank's share of the figures, and read them from the device once."""
    mixtures, names = dict(placed.model.mixtures()), list(placed.term_layers)
    values = norm_squared.new_zeros(3 + len(names))
    values[0], values[-1] = norm_squared, float(stop)
    if ran.losses:
        values[1] = torch.stack(ran.losses).sum()
    share_M = totals.share_M.unbind()
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
    squared, loss, *terms, stops, labels, tokens = read_scalars(
        *summed.unbind(), *totals.counts.unbind()
    )
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=True))
    return StepFigures(loss / max(labels, 1), norm, by_name, round(tokens), stops > 0)


@torch.no_grad()
def evaluate(
    placed: ModelParts, batches: Iterable[MicroBatch], loss_chunk: int
) -> tuple[float, int, float]:
    """Return summed cross-entropy in nats, number of labels, and bytes of their text.

    Micro-batches are taken one by one: a held-out set may be larger than memory. Every data rank
    gives as many, its own; the figures are those of all.
    """
    figures = torch.zeros(3, dtype=torch.float64, device=placed.world.device)
    overflow: list[Tensor] = []
    for batch in batches:
        flow = flow_of(placed, batch, training=False)
        with placed.world.recorder.module("evaluation"):
            figures[0] += score(placed, flow, loss_chunk)
        overflow += flow.overflow
        spot = placed.world.attention
        if spot.pp == spot.cp == spot.tp == 0:
            figures[1] += batch.n_labels
            figures[2] += batch.n_bytes
    check_overflow(placed, overflow)
    with placed.world.recorder.module("evaluation"):
        sum_(figures, placed.world.group("world"))
    total, labels, n_bytes = read_scalars(*figures.unbind())
    return total, round(labels), n_bytes
