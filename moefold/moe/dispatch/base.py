"""What a dispatcher does: brings token rows to the ranks of their experts, and results back.

T rows, D hidden, K experts per token, E local experts, R rows after dispatch.

A dispatcher keeps nothing between the two calls: what ``combine`` needs travels in the handle, so
that the two calls can be run, recomputed and scheduled apart.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moefold.comm.world import World

ALONE = World.single()
Handle = tuple[Any, ...]
"""Tensors, on the rows' device as whatever streams hand on, and values that the host knows."""


@dataclass(frozen=True)
class Dispatched:
    """Rows sorted by local expert."""

    x_RD: Tensor
    """Copies of token rows; rows past ``offs_E[-1]`` are unspecified and never read."""
    offs_E: Tensor
    """int32 end row of each expert."""
    probs_R: Tensor
    """Routing weight of each row, differentiable; unspecified past the last offset."""
    handle: Handle
    excess: Tensor | None = None
    """int64: by how many rows the fullest pair of ranks exceeds the stated room, whose rows are
    missing then; None where there is always room."""


class Dispatcher(Protocol):
    """The two calls behind which every way of sending rows stands."""

    def dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        complete: bool,
        world: World = ALONE,
    ) -> Dispatched:
        """Send each row to its experts.

        Args:
            x_TD: token rows.
            weights_TK: routing weights, differentiable.
            experts_TK: int64 expert ids in the order of their seats, rank by rank; E, one past the
                last, for a dropped copy and padding.
            complete: the host knows that no entry says "none".
            world: the groups; rows go over ``ep``, and over ``etp`` whose ranks share each expert.
        """
        ...

    def combine(self, y_RD: Tensor, handle: Handle, complete: bool, world: World = ALONE) -> Tensor:
        """Return ``out_TD``, the sum of each token's copies; weights are applied already."""
        ...
