"""Dispatch by one all-to-all over the expert-parallel group: each copy goes to its expert's rank.

T rows, D hidden, K experts per token, E experts, e of them here, R rows after dispatch, P ranks.
"""

from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.moe.dispatch.base import ALONE, Dispatched, Handle
from moefold.moe.dispatch.local import LocalDispatch


class AllToAllDispatch:
    """Token copies over ``ep``; where all experts are here, the permutation alone."""

    def __init__(self, record: Record, experts: int) -> None:
        self._experts = experts
        self._local = LocalDispatch(record, experts)

    def dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        complete: bool,
        world: World = ALONE,
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        return self._local.dispatch(x_TD, weights_TK, experts_TK, complete, world)

    def combine(self, y_RD: Tensor, handle: Handle, complete: bool, world: World = ALONE) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        return self._local.combine(y_RD, handle, complete, world)
