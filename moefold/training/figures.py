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
    extra_figures: Mapping[str, float] = field(default_factory=dict)
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


def sum_counts(parts: ModelParts, batches: Sequence[MicroBatch], objective: Objective) -> Totals:
    """Sum the counts of all data ranks' micro-batches."""
    world = parts.world
    multi_token = parts.model.record.multi_token
    losses = 1 + len(multi_token)
    labels = [sum(b.shift(offset).n_labels for b in batches) for offset in range(1, losses)]
    local = [sum(map(objective.units, batches)), *labels, *(b.population for b in batches)]
    pinned = world.device.type == "cuda"  # else the host would wait for the copy
    on_device = torch.tensor(local, pin_memory=pinned).to(world.device, non_blocking=True)
    rows = on_device[losses:]
    counts = sum_(torch.cat([on_device[:losses], rows.sum(0, keepdim=True)]), world.group("dp"))
    float_counts = counts.clamp(min=1).to(widest_dtype(world.device))
    scale_L = float_counts[:-1].reciprocal()
    for offset, future_token in enumerate(multi_token, 1):
        scale_L[offset] *= future_token.weight
    return Totals(counts, Factors(scale_L, rows / float_counts[-1]))


def reduce_figures(
    parts: ModelParts,
    result: StepResult,
    totals: Totals,
    norm_squared: Tensor,
    stop: bool,
    missing: Tensor | None,
    extra_names: Sequence[str],
) -> tuple[StepFigures, Tensor | None]:
    """Sum all ranks' parts of the metrics, and read them from the device once.

    ``extra_names`` names the further figures of the loss, then the loss of each further token.
    """
    means = 1 + len(extra_names)
    sizes = len(totals.counts)
    mixtures = dict(parts.model.moe_layers())
    names = list(parts.term_layers)
    values = norm_squared.new_zeros(2 + means + len(names) + (missing is not None))
    values[0] = norm_squared
    values[-1].fill_(stop)  # an assignment would wait for the device
    if missing is not None:
        values[-2] = (missing > 0).any()
    if result.losses:
        values[1 : 1 + means] = torch.stack(result.losses).sum(0)
    fraction_M = totals.factors.fraction_M.unbind()
    for index, name in enumerate(names, 1 + means):
        weighted_terms = [
            (terms_N[list(mixtures[layer].terms).index(name)], fraction_M[micro])
            for micro, layer, terms_N in result.terms
            if name in mixtures[layer].terms
        ]
        if weighted_terms:
            terms, fractions = (torch.stack(part) for part in zip(*weighted_terms, strict=True))
            values[index] = (terms * fractions).sum() / parts.term_layers[name]
    summed = sum_(values, parts.world.group("world"))
    scalars = read_scalars(*summed.unbind(), *totals.counts.unbind())
    squared, *sums, stops = scalars[:-sizes]
    units, *labels, tokens = scalars[-sizes:]
    denominators = [units] * (means - len(labels)) + labels
    loss, *extra = (s / max(n, 1) for s, n in zip(sums[:means], denominators, strict=True))
    terms = sums[means:]
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=False))  # The overflow flag comes last.
    extra_figures = dict(zip(extra_names, extra, strict=True))
    figures = StepFigures(loss, norm, by_name, round(tokens), stops > 0, extra_figures)
    return figures, missing if missing is not None and terms[-1] > 0 else None


def routing_health(parts: ModelParts) -> list[dict[str, Any]]:
    """Return the last step's routing statistics of each mixture of a model, ordered by layer.

    All ranks call it; those of one stage have the same statistics.
    """
    layers = []
    for number, mixture in parts.model.moe_layers():
        figures = mixture.balance.health(mixture.router)
        statistics = {"layer": number, "top_k": mixture.record.router.top_k}
        layers.append(statistics | {name: values.tolist() for name, values in figures.items()})
    is_first = parts.world.group("stage").index == 0
    layers_by_rank = gather_objects(layers if is_first else [], parts.world.on_host)
    return sorted(chain.from_iterable(layers_by_rank), key=itemgetter("layer"))
