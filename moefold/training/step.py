"""One optimizer step up to the update: forward and backward of its micro-batches, and its metrics.

T rows, D hidden. A step's loss is a sum, such as the cross-entropy of all valid labels, divided by
their global count, plus each router term weighted by its micro-batch's share of valid rows. Counts
and metrics are summed over all ranks, and the metrics are read from the device once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow
from moefold.moe.balance import sum_counters
from moefold.optim.norm import read_scalars, widest
from moefold.parallel.apply import ModelParts, flow_of
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.limits import check_even_rows, enough_room, missing_room, no_room, repeats
from moefold.parallel.pipeline.executor import Factors, StepResult, run_step
from moefold.training.losses.base import CROSS_ENTROPY, Objective


@dataclass(frozen=True)
class StepFigures:
    """Metrics of one forward and backward of a whole batch, read from the device once."""

    lm_loss: float
    """Mean loss over the step's units; for cross-entropy, nats per label."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    router_terms: dict[str, float]
    """Each balancing term, averaged over layers and over the step's valid rows."""
    tokens: int
    """Valid rows."""
    stop: bool = False
    """Whether some rank was asked to end the run."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Means of the loss's further figures, and the loss of each further token."""
    needed_rows: int = 0
    """Sufficient ``layout.dispatch.max_rows`` if the step was redone after an overflow; else 0."""
    needed_load: float = 0.0
    """Sufficient ``layout.offload.pages.load`` if it was redone as pages overflowed; else 0."""

    @property
    def finite(self) -> bool:
        """Whether loss, gradient norm and router terms are all finite."""
        figures = (self.lm_loss, self.grad_norm, *self.router_terms.values())
        return all(abs(f) < float("inf") for f in figures)


class Totals(NamedTuple):
    """A step's counts over all data ranks, on the device, so that the host never waits."""

    counts: Tensor
    """int64: units of the loss, such as labels; labels of each further token; valid rows."""
    factors: Factors


def gradients(
    data: ShardedState,
    batches: Sequence[MicroBatch],
    loss_chunk: int,
    stop: bool = False,
    executor: Callable[..., StepResult] = run_step,
    objective: Objective = CROSS_ENTROPY,
) -> StepFigures:
    """Compute the gradients of a step's loss for every trained parameter; return its metrics.

    A step whose rows overflowed a dispatcher's stated room is recomputed without that limit.

    Args:
        data: the model's parts on this rank; their gradients are discarded first.
        batches: this data rank's micro-batches, whole and in order; every data rank has as many.
        loss_chunk: number of rows whose logits exist at a time.
        stop: whether this rank was asked to end the run; the result says it on all ranks.
        executor: runs this rank's part of the pipeline schedule.
        objective: the loss.

    Raises:
        ValueError: if rows overflowed and the layout has overflow end the run.
    """
    placed = data.placed
    with placed.world.recorder.module("step"):
        totals = totals_of(placed, batches, objective)
        check_even_rows(placed, batches)
    run = partial(_pass, data, batches, totals, loss_chunk, stop, executor, objective)
    figures, missing = run()
    if missing is None:
        return figures
    needed = enough_room(placed, missing)
    if not repeats(placed):
        raise no_room(placed, needed)
    return replace(run(exact=True)[0], **needed._asdict())


def _pass(
    data: ShardedState,
    batches: Sequence[MicroBatch],
    totals: Totals,
    loss_chunk: int,
    stop: bool,
    executor: Callable[..., StepResult],
    objective: Objective,
    exact: bool = False,
) -> tuple[StepFigures, Tensor | None]:
    """Run forward and backward of all micro-batches, with gradients and counters set to zero.

    Returns the metrics and, if rows overflowed on any rank, the overflow of this one, else None.
    """
    placed = data.placed
    model, world = placed.model, placed.world
    module = world.recorder.module
    flows = [flow_of(placed, batch, exact=exact) for batch in batches]
    with module("loss"):
        flows = [
            replace(flow, known=objective.known(placed, batch, flow, loss_chunk))
            for batch, flow in zip(batches, flows, strict=True)
        ]
    data.begin_step(len(batches))
    model.start_step()

    def loss(x_TD: Tensor, flow: Flow, scale: Tensor) -> tuple[Tensor, Tensor]:
        head = model.head_operand(flow)
        with module("loss"):
            return objective(x_TD, head, flow, scale=scale, chunk=loss_chunk)

    with module("pipeline"):
        ran = executor(placed, flows, totals.factors, loss)
    with module("gradients"):
        norm_squared = data.finish()
    with module("counters"):
        sum_counters([mixture.balance for _, mixture in model.mixtures()], world.group("stage"))
    missing = missing_room(placed, [count for flow in flows for count in flow.overflow])
    later = range(1, 1 + len(model.record.multi_token))
    more = [*objective.figures, *(f"multi_token/{number}" for number in later)]
    with module("figures"):
        return figures_of(placed, ran, totals, norm_squared, stop, missing, more)


def totals_of(placed: ModelParts, batches: Sequence[MicroBatch], objective: Objective) -> Totals:
    """Sum the counts of all data ranks' micro-batches."""
    world, multi_token = placed.world, placed.model.record.multi_token
    losses = 1 + len(multi_token)
    labels = [sum(b.ahead(later).n_labels for b in batches) for later in range(1, losses)]
    here = [sum(map(objective.units, batches)), *labels, *(b.population for b in batches)]
    pinned = world.device.type == "cuda"  # else the host would wait for the copy
    said = torch.tensor(here, pin_memory=pinned).to(world.device, non_blocking=True)
    rows = said[losses:]
    counts = sum_(torch.cat([said[:losses], rows.sum(0, keepdim=True)]), world.group("dp"))
    wide = counts.clamp(min=1).to(widest(world.device))
    scale_L = wide[:-1].reciprocal()
    for later, one in enumerate(multi_token, 1):
        scale_L[later] *= one.weight
    return Totals(counts, Factors(scale_L, rows / wide[-1]))


def figures_of(
    placed: ModelParts,
    ran: StepResult,
    totals: Totals,
    norm_squared: Tensor,
    stop: bool,
    missing: Tensor | None,
    more: Sequence[str],
) -> tuple[StepFigures, Tensor | None]:
    """Sum all ranks' parts of the metrics, and read them from the device once.

    ``more`` names the further figures of the loss, then the loss of each further token.
    """
    means, sizes = 1 + len(more), len(totals.counts)
    mixtures, names = dict(placed.model.mixtures()), list(placed.term_layers)
    values = norm_squared.new_zeros(2 + means + len(names) + (missing is not None))
    values[0] = norm_squared
    values[-1].fill_(stop)  # an assignment would wait for the device
    if missing is not None:
        values[-2] = (missing > 0).any()
    if ran.losses:
        values[1 : 1 + means] = torch.stack(ran.losses).sum(0)
    share_M = totals.factors.share_M.unbind()
    for at, name in enumerate(names, 1 + means):
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
    squared, *told, stops = said[:-sizes]
    units, *labels, tokens = said[-sizes:]
    of = [units] * (means - len(labels)) + labels
    loss, *beside = (total / max(by, 1) for total, by in zip(told[:means], of, strict=True))
    terms = told[means:]
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=False))  # The overflow flag comes last.
    figures = StepFigures(
        loss, norm, by_name, round(tokens), stops > 0, dict(zip(more, beside, strict=True))
    )
    return figures, missing if missing is not None and terms[-1] > 0 else None
