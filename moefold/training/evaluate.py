"""Evaluation: the loss of held-out micro-batches, forward only, in any layout."""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from moefold.comm.collectives import sum_
from moefold.data.batch import MicroBatch
from moefold.data.loader import Loader
from moefold.optim.norm import read_scalars
from moefold.parallel.apply import ModelParts, build_flow
from moefold.parallel.limits import (
    missing_room,
    overflow_error,
    repeats_on_overflow,
    sufficient_settings,
)
from moefold.parallel.pipeline.score import score
from moefold.training.losses.base import CROSS_ENTROPY, Objective


def evaluate_sets(
    parts: ModelParts, loader: Loader, tokens: int | None, loss_chunk: int, objective: Objective
) -> dict[str, float | int]:
    """Return ``val_loss`` over all held-out sets, and loss and bits per byte of each.

    At most about ``tokens`` tokens of each set are read; None reads all.
    """
    metrics: dict[str, float | int] = {}
    nats = labels = 0.0
    for name in loader.evaluation_sets:
        batches = loader.evaluation(name, tokens)
        (loss, *extra_totals), units, n_bytes = evaluate(parts, batches, loss_chunk, objective)
        metrics[f"val/{name}/loss"] = loss / max(units, 1)
        for figure, total in zip(objective.figures, extra_totals, strict=True):
            metrics[f"val/{name}/{figure}"] = total / max(units, 1)
        if n_bytes and not objective.figures:
            metrics[f"val/{name}/bits_per_byte"] = loss / math.log(2) / n_bytes
        nats = nats + loss
        labels = labels + units
    return {"val_loss": nats / labels, **metrics} if labels else metrics


@torch.no_grad()
def evaluate(
    parts: ModelParts,
    batches: Iterable[MicroBatch],
    loss_chunk: int,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[list[float], int, float]:
    """Return summed loss and figures, number of units, and bytes of the labels' text, of all ranks.

    ``batches`` are this data rank's, as many as on every other. They are consumed one by one: a
    held-out set may be larger than memory.
    """
    n_sums = 1 + len(objective.figures)
    figures = torch.zeros(n_sums + 3, dtype=torch.float64, device=parts.world.device)
    overflow: list[Tensor] = []
    exact = repeats_on_overflow(parts)
    for batch in batches:
        flow = build_flow(parts, batch, training=False, exact=exact)
        flow = replace(flow, reference=objective.reference(parts, batch, flow, loss_chunk))
        with parts.world.recorder.module("evaluation"):
            if (sums := score(parts, flow, objective.score, loss_chunk)) is not None:
                figures[:n_sums] += sums
        overflow += flow.overflow
        coordinates = parts.world.attention
        if coordinates.pp == coordinates.cp == coordinates.tp == 0:
            figures[n_sums] += objective.units(batch)
            figures[n_sums + 1] += batch.n_bytes
    missing = missing_room(parts, overflow)
    if missing is not None:
        figures[-1] = (missing > 0).any()
    with parts.world.recorder.module("evaluation"):
        sum_(figures, parts.world.group("world"))
    *totals, units, n_bytes, short = read_scalars(figures)
    if missing is not None and short > 0:
        raise overflow_error(parts, sufficient_settings(parts, missing))
    return totals, round(units), n_bytes
