"""What a step counts and tells: its units over all ranks, and the figures that are read once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.optim.norm import read_scalars, widest
from moefold.parallel.apply import ModelParts
from moefold.parallel.pipeline.executor import Factors, StepResult
from moefold.training.losses.base import Objective


@dataclass(frozen=True)
class StepFigures:
    """What one forward and backward of a whole batch gave, read from the device once."""

    lm_loss: float
    """Mean over the step's units: cross-entropy over labels, in nats."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    router_terms: dict[str, float]
    """Each balancing term, averaged over layers and over the step's valid rows."""
    tokens: int
    """Valid rows."""
    stop: bool = False
    """Whether some rank was asked to end the run."""
    more: tuple[float, ...] = ()
    """Means of what the loss tells beside itself."""
    needed_rows: int = 0
    """``max_rows`` that dispatch lacked, so that the step was made again by all-to-all; else 0."""

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        figures = (self.lm_loss, self.grad_norm, *self.router_terms.values())
        return all(abs(f) < float("inf") for f in figures)


class Totals(NamedTuple):
    """A step's counts over all data ranks. They stay on the device: none is waited for."""

    counts: Tensor
    """int64 units of the loss, such as labels, and valid rows."""
    factors: Factors


def totals_of(batches: Sequence[MicroBatch], world: World, objective: Objective) -> Totals:
    """Sum the data ranks' counts of their micro-batches."""
    here = [sum(map(objective.units, batches)), *(b.population for b in batches)]
    pinned = world.device.type == "cuda"  # or the host would wait for the copy
    said = torch.tensor(here, pin_memory=pinned).to(world.device, non_blocking=True)
    counts = sum_(torch.stack([said[0], said[1:].sum()]), world.group("dp"))
    wide = counts.clamp(min=1).to(widest(world.device))
    return Totals(counts, Factors(wide[0].reciprocal(), said[1:] / wide[1]))


def figures_of(
    placed: ModelParts,
    ran: StepResult,
    totals: Totals,
    norm_squared: Tensor,
    stop: bool,
    missing: Tensor | None,
    more: int,
) -> tuple[StepFigures, Tensor | None]:
    """Add up every rank's share of the figures, and read them from the device once."""
    mixtures, names = dict(placed.model.mixtures()), list(placed.term_layers)
    values = norm_squared.new_zeros(3 + more + len(names) + (missing is not None))
    values[0] = norm_squared
    values[-1].fill_(stop)  # assigned, the number would be waited for
    if missing is not None:
        values[-2] = missing > 0
    if ran.losses:
        values[1 : 2 + more] = torch.stack(ran.losses).sum(0)
    share_M = totals.factors.share_M.unbind()
    for at, name in enumerate(names, 2 + more):
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
    squared, *means, stops, units, tokens = said
    (loss, *beside), terms = (mean / max(units, 1) for mean in means[: 1 + more]), means[1 + more :]
    norm = math.sqrt(squared) if squared >= 0 else squared
    by_name = dict(zip(names, terms, strict=False))  # Whether rows lacked room comes last.
    figures = StepFigures(loss, norm, by_name, round(tokens), stops > 0, tuple(beside))
    return figures, missing if missing is not None and terms[-1] > 0 else None
