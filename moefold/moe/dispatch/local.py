"""Dispatch where all experts are on this rank: a permutation, no host read, no communication."""

from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.kernels.permute.gather import collect
from moefold.moe.dispatch.base import ALONE, Dispatched, Handle
from moefold.moe.dispatch.order import sort_copies


class LocalDispatch:
    """Sorts copies by expert; inside an expert they stand in the order of tokens."""

    def __init__(self, record: Record, experts: int) -> None:
        self._experts = experts

    def dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        complete: bool,
        world: World = ALONE,
    ) -> Dispatched:
        """Permute rows; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        assert world.group("tp_ep").size == 1, "experts live on other ranks"
        return permute(x_TD, weights_TK, experts_TK, self._experts, complete)

    def combine(self, y_RD: Tensor, handle: Handle, complete: bool, world: World = ALONE) -> Tensor:
        """Gather and sum; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        token_R, row_TK = handle
        return collect(y_RD, token_R, row_TK, complete)


def permute(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: int,
    complete: bool,
    rows: int | None = None,
) -> Dispatched:
    """Sort copies by the experts that are here: the last part of every dispatch.

    Args:
        x_TD: rows.
        weights_TK: weights of their entries.
        experts_TK: int64 slot of each entry's expert; ``experts`` for an entry that is not here.
        experts: number of experts here.
        complete: the host knows that no entry says "none".
        rows: how many copies there are, where the host knows; T * K rows otherwise.

    Returns:
        Rows and the handle (token_R, row_TK) that ``collect`` brings their results back with.
    """
    order = sort_copies(experts_TK, experts, complete)
    order = order if rows is None else order.first(rows)
    handle = (order.token_R, order.row_TK)
    x_RD = order.rows(x_TD, complete)
    return Dispatched(x_RD, order.offs_B, order.entries(weights_TK), handle)
