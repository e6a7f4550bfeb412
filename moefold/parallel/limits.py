"""What a dispatcher demands of a step's rows: as many on every rank, or no more than fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import max_, sum_
from moefold.data.batch import MicroBatch
from moefold.moe.config import Dispatch
from moefold.optim.norm import read_scalars
from moefold.parallel.apply import ModelParts


def check_even_rows(placed: ModelParts, batches: Sequence[MicroBatch]) -> None:
    """Refuse micro-batches of different numbers of rows where the dispatch needs equal ones.

    Raises:
        ValueError: on all ranks alike, before any row is sent.
    """
    dispatch = placed.layout.dispatch
    if not isinstance(dispatch, Dispatch) or not dispatch.even_rows:
        return
    said = torch.tensor([(1, b.rows, b.rows**2) for b in batches])
    said = said.to(placed.world.device, non_blocking=True)
    n, rows, squares = sum_(said.sum(0), placed.world.group("dp")).tolist()
    # Of numbers with one sum, equal ones have the least sum of squares.
    if n * squares != rows**2:
        raise ValueError(
            f"layout.dispatch: {dispatch.kind} needs as many rows in every micro-batch on every "
            f"rank, and not all have the mean, {rows / n:g}. Pack sequences to one length, or "
            "choose dispatch: alltoall_once"
        )


def check_overflow(placed: ModelParts, overflow: Sequence[Tensor]) -> None:
    """Refuse passes in which a dispatch of stated capacity left rows out; all ranks do alike.

    ``overflow`` are, of every such dispatch here, the rows that it could not take.

    Raises:
        ValueError: names the capacity that would have been enough.
    """
    dispatch = placed.layout.dispatch
    capacity = dispatch.capacity if isinstance(dispatch, Dispatch) else None
    if capacity is None:
        return
    most = torch.zeros((), dtype=torch.int64, device=placed.world.device)
    with placed.world.recorder.module("room"):
        most = max_(torch.stack([most, *overflow]).amax(), placed.world.group("world"))
    (missing,) = read_scalars(most)
    if missing:
        needed = capacity + round(missing)
        raise ValueError(
            f"layout.dispatch.max_rows is {capacity}, and a rank had {needed} rows for another. "
            f"Set max_rows to {needed} or more, or choose dispatch: alltoall"
        )
