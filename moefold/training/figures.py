"""Counts and metrics of a step: summed over all ranks, and read from the device once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects, sum_
from moefold.data.batch import MicroBatch
from moefold.optim.norm import read_scalars, widest_dtype
from moefold.parallel.apply import ModelParts
from moefold.parallel.pipeline.executor import Factors, StepResult
from moefold.training.losses.base import Objective


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


def totals_of(placed: ModelParts, batches: Sequence[MicroBatch], objective: Objective) -> Totals:
    """Sum the counts of all data ranks' micro-batches."""
    world, multi_token = placed.world, placed.model.record.multi_token
    losses = 1 + len(multi_token)
    labels = [sum(b.shift(later).n_labels for b in batches) for later in range(1, losses)]
    here = [sum(map(objective.units, batches)), *labels, *(b.population for b in batches)]
    pinned = world.device.type == "cuda"  # else the host would wait for the copy
    said = torch.tensor(here, pin_memory=pinned).to(world.device, non_blocking=True)
    rows = said[losses:]
    counts = sum_(torch.cat([said[:losses], rows.sum(0, keepdim=True)]), world.group("dp"))
    wide = counts.clamp(min=1).to(widest_dtype(world.device))
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
    mixtures, names = dict(placed.model.moe_layers()), list(placed.term_layers)
    values = norm_squared.new_zeros(2 + means + len(names) + (missing is not None))
    values[0] = norm_squared
    values[-1].fill_(stop)  # an assignment would wait for the device
    if missing is not None:
        values[-2] = (missing > 0).any()
    if ran.losses:
        values[1 : 1 + means] = torch.stack(ran.losses).sum(0)
    share_M = totals.factors.fraction_M.unbind()
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


def routing_health(placed: ModelParts) -> list[dict[str, Any]]:
    """Return the last step's routing statistics of each mixture of a model, ordered by layer.

    All ranks call it; those of one stage have the same statistics.
    """
    layers = []
    for number, mixture in placed.model.moe_layers():
        figures = mixture.balance.health(mixture.router)
        said = {"layer": number, "top_k": mixture.record.router.top_k}
        layers.append(said | {name: held.tolist() for name, held in figures.items()})
    first = placed.world.group("stage").index == 0
    everywhere = gather_objects(layers if first else [], placed.world.on_host)
    return sorted(chain.from_iterable(everywhere), key=itemgetter("layer"))
