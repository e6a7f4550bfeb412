"""What a dispatcher demands of a step's rows: as many on every rank, or no more than fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import max_, sum_
from moefold.data.batch import MicroBatch
from moefold.moe.dispatch.config import Dispatch, FixedRoom
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


def repeats(placed: ModelParts) -> bool:
    """Return whether a step whose rows lacked room is made again without a bound."""
    dispatch = placed.layout.dispatch
    return isinstance(dispatch, FixedRoom) and dispatch.on_overflow == "again"


def missing_room(placed: ModelParts, overflow: Sequence[Tensor]) -> Tensor | None:
    """Return the most rows, int64, that any dispatch here lacked room for; None without a bound."""
    if not isinstance(placed.layout.dispatch, FixedRoom):
        return None
    none = torch.zeros((), dtype=torch.int64, device=placed.world.device)
    return torch.stack([none, *overflow]).amax()


def enough_room(placed: ModelParts, missing: Tensor) -> int:
    """Return the ``max_rows`` that would have been enough on every rank.

    All ranks ask, once some lacked room. ``missing`` is what each lacked.
    """
    dispatch = placed.layout.dispatch
    assert isinstance(dispatch, FixedRoom)
    with placed.world.recorder.module("room"):
        (most,) = read_scalars(max_(missing.clone(), placed.world.group("world")))
    return dispatch.max_rows + round(most)


def no_room(placed: ModelParts, needed: int) -> ValueError:
    """Return the error that ends a run whose rows did not fit; it names the room that is enough."""
    dispatch = placed.layout.dispatch
    assert isinstance(dispatch, FixedRoom)
    return ValueError(
        f"layout.dispatch.max_rows is {dispatch.max_rows}, and {needed} is needed. Set max_rows to "
        f"{needed} or more, let on_overflow be again, or choose dispatch: alltoall"
    )
