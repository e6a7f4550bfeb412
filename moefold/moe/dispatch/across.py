"""What all ways between ranks share: where one rank has all experts, nothing is sent."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.moe.dispatch.base import ALONE, Dispatched, Handle
from moefold.moe.dispatch.local import LocalDispatch

Way = TypeVar("Way", bound=Record)


class Across(ABC, Generic[Way]):
    """A dispatcher over ``ep`` and ``etp``: it says how rows go there and how they return."""

    def __init__(self, record: Way, experts: int) -> None:
        self._record, self._experts = record, experts
        self._local = LocalDispatch(record, experts)

    def dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        complete: bool,
        world: World = ALONE,
    ) -> Dispatched:
        """Send or permute rows; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        send = self._local.dispatch if _alone(world) else self.send
        return send(x_TD, weights_TK, experts_TK, complete, world)

    def combine(self, y_RD: Tensor, handle: Handle, complete: bool, world: World = ALONE) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.base.Dispatcher`."""
        fetch = self._local.combine if _alone(world) else self.fetch
        return fetch(y_RD, handle, complete, world)

    @abstractmethod
    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Dispatch where experts are on other ranks too."""

    @abstractmethod
    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Combine where experts are on other ranks too."""


def _alone(world: World) -> bool:
    return world.group("tp_ep").size == 1
