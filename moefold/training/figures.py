"""Counts and metrics of a step: summed over all ranks, and read from the device once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
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
    def by_name(self) -> dict[str, float]:
        """The figures of a step under the names by which they are shown."""
        means = {"lm_loss": self.lm_loss, "grad_norm": self.grad_norm}
        rooms = {"needed_rows": self.needed_rows, "needed_load": self.needed_load}
        terms = {f"router/{name}": value for name, value in self.router_terms.items()}
        return means | {n: v for n, v in rooms.items() if v} | dict(self.extra_figures) | terms

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
    units = sum(map(objective.units, batches))
    labels = [sum(b.shift(offset).n_labels for b in batches) for offset in range(1, losses)]
    local = [units, *labels, *(batch.population for batch in batches)]
    pinned = world.device.type == "cuda"  # else the host would wait for the copy
    on_device = torch.tensor(local, pin_memory=pinned).to(world.device, non_blocking=True)
    rows = on_device[losses:]
    local_counts = torch.cat([on_device[:losses], rows.sum(0, keepdim=True)])
    counts = sum_(local_counts, world.group("dp"))
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
    losses = norm_squared.new_zeros(1 + len(extra_names))
    if result.losses:  # of the last stage alone
        losses = torch.stack(result.losses).sum(0).reshape(-1)
    local = {
        "norm_squared": norm_squared.reshape(1),
        "losses": losses,
        "terms": _router_terms(parts, result, totals, norm_squared),
        "stop": norm_squared.new_full((1,), stop),
    }
    if missing is not None:
        local["overflow"] = (missing > 0).any().reshape(1)
    summed = sum_(_pack(local, norm_squared.dtype), parts.world.group("world"))
    values = _unpack(summed, local, totals.counts)

    units, *labels, tokens = values["counts"]
    # The loss and its figures are means over units, then each further token's over its labels.
    denominators = [units] * (len(losses) - len(labels)) + labels
    means = [total / max(n, 1) for total, n in zip(values["losses"], denominators, strict=True)]
    (squared,) = values["norm_squared"]
    (stops,) = values["stop"]
    figures = StepFigures(
        lm_loss=means[0],
        grad_norm=math.sqrt(squared) if squared >= 0 else squared,
        router_terms=dict(zip(parts.term_layers, values["terms"], strict=True)),
        tokens=round(tokens),
        stop=stops > 0,
        extra_figures=dict(zip(extra_names, means[1:], strict=True)),
    )
    has_overflow = sum(values.get("overflow", [])) > 0
    return figures, missing if has_overflow else None


def _router_terms(parts: ModelParts, result: StepResult, totals: Totals, like: Tensor) -> Tensor:
    """Return this rank's share of each balancing term, averaged over the layers that have it."""
    mixtures = dict(parts.model.moe_layers())
    fraction_M = totals.factors.fraction_M.unbind()
    shares = like.new_zeros(len(parts.term_layers))
    for index, (name, layers) in enumerate(parts.term_layers.items()):
        terms = []
        fractions = []
        for micro, layer, terms_N in result.terms:
            names = list(mixtures[layer].terms)
            if name in names:
                terms.append(terms_N[names.index(name)])
                fractions.append(fraction_M[micro])
        if terms:
            weighted = torch.stack(terms) * torch.stack(fractions)
            shares[index] = weighted.sum() / layers
    return shares


def _pack(vectors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return vectors as one, for one exchange."""
    return torch.cat([vector.to(dtype) for vector in vectors.values()])


def _unpack(
    packed: Tensor, vectors: Mapping[str, Tensor], counts: Tensor
) -> dict[str, list[float]]:
    """Read what ``_pack`` made of ``vectors``, and further ``counts``, by name in one transfer."""
    everything = {**vectors, "counts": counts}
    values = iter(read_scalars(torch.cat([packed, counts.to(packed.dtype)])))
    return {name: list(islice(values, len(vector))) for name, vector in everything.items()}


def routing_health(parts: ModelParts) -> list[dict[str, Any]]:
    """Return the last step's routing statistics of each mixture of a model, ordered by layer.

    All ranks call it; those of one stage have the same statistics.
    """
    layers = []
    for number, mixture in parts.model.moe_layers():
        figures = mixture.balance.health(mixture.router)
        statistics = {"layer": number, "top_k": mixture.record.router.top_k}
        statistics |= {name: values.tolist() for name, values in figures.items()}
        layers.append(statistics)
    is_first = parts.world.group("stage").index == 0
    layers_by_rank = gather_objects(layers if is_first else [], parts.world.on_host)
    return sorted(chain.from_iterable(layers_by_rank), key=itemgetter("layer"))
