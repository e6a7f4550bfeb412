"""Checks a step's rows against its dispatcher: equal counts on all ranks, or a fixed capacity."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import max_, sum_
from moefold.data.batch import MicroBatch
from moefold.moe.dispatch.config import Dispatch, FixedShape
from moefold.optim.norm import read_scalars
from moefold.parallel.apply import ModelParts


def check_even_rows(parts: ModelParts, batches: Sequence[MicroBatch]) -> None:
    """Raise if micro-batches differ in rows and the dispatcher requires equal numbers.

    Raises:
        ValueError: on all ranks, before any row is sent.
    """
    dispatch = parts.layout.dispatch
    if not isinstance(dispatch, Dispatch) or not dispatch.needs_equal_rows:
        return
    counts = torch.tensor([(1, b.rows, b.rows**2) for b in batches])
    counts = counts.to(parts.world.device, non_blocking=True)
    n, rows, squares = sum_(counts.sum(0), parts.world.group("dp")).tolist()
    # Cauchy-Schwarz: n * sum(r**2) >= sum(r)**2, with equality only where all r are equal.
    if n * squares != rows**2:
        raise ValueError(
            f"layout.dispatch: {dispatch.kind} needs the same number of rows in every micro-batch "
            f"on every rank, but some differ from the mean, {rows / n:g}. Pack sequences to one "
            "length, or use dispatch: alltoall_once"
        )


def repeats_on_overflow(parts: ModelParts) -> bool:
    """Return whether a step that exceeded the dispatcher's capacity is repeated without one."""
    dispatch = parts.layout.dispatch
    return isinstance(dispatch, FixedShape) and dispatch.on_overflow == "again"


def missing_room(parts: ModelParts, overflow: Sequence[Tensor]) -> Tensor | None:
    """Return the most rows (int64) by which a dispatch exceeded its capacity; None without one.

    With pages, a second number: the missing pages, in thousandths.
    """
    if not isinstance(parts.layout.dispatch, FixedShape):
        return None
    none = torch.zeros((), dtype=torch.int64, device=parts.world.device)
    rows = torch.stack([none, *overflow]).amax()
    stash = parts.offload and parts.offload.stash
    return rows if stash is None else torch.stack([rows, stash.shortage()])


class SufficientSettings(NamedTuple):
    """Settings that would have sufficed for a step; 0 where the present value did."""

    needed_rows: int
    """``layout.dispatch.max_rows``."""
    needed_load: float = 0.0
    """``layout.offload.pages.load``."""


def sufficient_settings(parts: ModelParts, missing: Tensor) -> SufficientSettings:
    """Return the settings that would have sufficed on every rank.

    A collective call, for a step in which any rank exceeded its capacity. ``missing``: this rank's.
    """
    dispatch = parts.layout.dispatch
    offload = parts.layout.offload
    assert isinstance(dispatch, FixedShape)
    with parts.world.recorder.module("room"):
        most = max_(missing.clone(), parts.world.group("world"))
        rows, *thousandths = map(round, read_scalars(most.reshape(-1)))
    load = 0.0
    if offload is not None and offload.pages is not None and any(thousandths):
        load = ceil(offload.pages.load * (1000 + thousandths[0])) / 1000
    return SufficientSettings(dispatch.max_rows + rows if rows else 0, load)


def overflow_error(parts: ModelParts, needed: SufficientSettings) -> ValueError:
    """Return the error for a run that exceeded its capacity, with a sufficient setting."""
    dispatch = parts.layout.dispatch
    offload = parts.layout.offload
    assert isinstance(dispatch, FixedShape)
    if not needed.needed_rows:
        assert offload is not None and offload.pages is not None
        return ValueError(
            f"layout.offload.pages.load is {offload.pages.load:g}, but {needed.needed_load:g} is "
            "needed. Set load to that or more, or layout.dispatch.on_overflow to again"
        )
    rows = needed.needed_rows
    return ValueError(
        f"layout.dispatch.max_rows is {dispatch.max_rows}, but {rows} is needed. Set max_rows to "
        f"{rows} or more, or on_overflow to again, or use dispatch: alltoall"
    )
