"""One optimizer step: micro-batches forward and backward, the checks, the update.

T rows, D hidden. The loss of a step is the summed cross-entropy of its valid labels over their
global count, plus each router term weighted by its micro-batch's share of the step's valid rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow, cut
from moefold.layers.loss import loss_and_gradients
from moefold.layers.recompute import Recompute
from moefold.moe.balance import sum_counters
from moefold.optim.norm import read_scalars
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
        here = [sum(b.n_labels for b in batches), sum(b.population for b in batches)]
        everywhere = sum_(torch.tensor(here).to(world.device), world.group("dp"))
        labels, tokens = everywhere.tolist()
        check_even_rows(placed, batches)
    data.begin_step(len(batches))
    for _, mixture in model.mixtures():
        mixture.balance.start_step()
    shares = [batch.population / max(tokens, 1) for batch in batches]

    def loss(x_TD: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
        head, scale = model.head_operand(), 1 / max(labels, 1)
        with module("loss"):
            return loss_and_gradients(x_TD, head, flow, scale=scale, chunk=loss_chunk)

    flows = [flow_of(placed, batch) for batch in batches]
    with module("pipeline"):
        ran = Executor(placed, flows, shares, loss).run()
    check_overflow(placed, [count for flow in flows for count in flow.overflow])
    with module("gradients"):
        norm_squared = data.finish()
    balances = [mixture.balance for _, mixture in model.mixtures()]
    with module("counters"):
        sum_counters(balances, world.group("stage"))
    with module("figures"):
        return _figures(placed, ran, shares, norm_squared, labels, tokens, stop)


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
    placed: ModelParts,
    ran: StepResult,
    shares: Sequence[float],
    norm_squared: Tensor,
    labels: int,
    tokens: int,
    stop: bool,
) -> StepFigures:
    """Add up every rank's share of the figures, and read them from the device once."""
    device, names = norm_squared.device, list(placed.term_layers)
    values = torch.zeros(3 + len(names), dtype=torch.float64, device=device)
    values[0], values[-1] = norm_squared, float(stop)
    if ran.losses:
        values[1] = torch.stack(ran.losses).sum()
    mixtures = dict(placed.model.mixtures())
    for micro, layer, terms_N in ran.terms:
        for name, value in zip(mixtures[layer].terms, terms_N.unbind(), strict=True):
            values[2 + names.index(name)] += value * shares[micro] / placed.term_layers[name]
    summed = read_scalars(*sum_(values, placed.world.group("world")).unbind())
    squared, loss, *terms, stops = summed
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=True))
    return StepFigures(loss / max(labels, 1), norm, by_name, tokens, stops > 0)


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
            figures[1:] += torch.tensor([batch.n_labels, batch.n_bytes], device=figures.device)
    check_overflow(placed, overflow)
    with placed.world.recorder.module("evaluation"):
        sum_(figures, placed.world.group("world"))
    total, labels, n_bytes = read_scalars(*figures.unbind())
    return total, round(labels), n_bytes
