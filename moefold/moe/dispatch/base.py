"""What a dispatcher does: brings token rows to the ranks of their experts, and results back.

T rows, D hidden, K experts per token, E local experts, R rows after dispatch.

A dispatcher keeps nothing between the two calls: what ``combine`` needs travels in the handle, so
that the two calls can be run, recomputed and scheduled apart.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from moefold.comm.collectives import Codes
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.kernels.permute.gather import collect, spread
from moefold.layers.flow import SINGLE_RANK
from moefold.moe.dispatch.routing_plan import Permutation, RoutedTokens, sort_copies

Handle = tuple[Any, ...]
"""Tensors, on the rows' device as whatever streams hand on, and values that the host knows."""
Config = TypeVar("Config", bound=Record)


class Dispatched(NamedTuple):
    """Rows sorted by local expert."""

    x_RD: Tensor
    """Copies of token rows; rows past ``offs_E[-1]`` are unspecified and never read."""
    offs_E: Tensor
    """int32 end row of each expert."""
    probs_R: Tensor
    """Routing weight of each row, differentiable; unspecified past the last offset."""
    handle: Handle
    overflow: Tensor | None = None
    """int64: by how many rows the fullest pair of ranks exceeds the stated capacity, whose rows are
    missing then; None where there is no limit."""
    source: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None
    """What ``x_RD`` can be made from again, and by what, where that is smaller."""
    sent_R: Tensor | None = None
    """Which micro-batch each row is of, and its place there, where products on codes ask."""
    clones: Tensor | None = None
    """int64 [P, s]: the expert whose clone is in each slot of each rank; behind the experts at home
    rows are for those of this rank."""


class Dispatcher(Generic[Config]):
    """The two calls behind which every way of sending rows stands; itself it sends none.

    Where all experts are here, dispatch is a permutation, without host read or communication:
    copies are sorted by expert, inside an expert they stand in the order of tokens. A subclass says
    how rows go to other ranks of ``ep`` and ``etp`` (``send``) and how they return (``fetch``).
    """

    wire: Codes | None = None
    """What rows on their way to experts, and gradients of results, travel as."""

    def __init__(self, record: Config, experts: int) -> None:
        self._record, self._experts = record, experts

    def hand_on(self, sent: RoutedTokens, exchange: Callable[..., Tensor]) -> RoutedTokens:
        """Return what an exchange of tensors brings of all three: rows travel as codes do."""
        x_ND = exchange(sent.x_TD, codes=self.wire)
        return RoutedTokens(x_ND, exchange(sent.weights_TK), exchange(sent.experts_TK))

    def dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        no_drop: bool,
        world: World = SINGLE_RANK,
    ) -> Dispatched:
        """Send each row to its experts.

        Args:
            x_TD: token rows.
            weights_TK: routing weights, differentiable.
            experts_TK: int64 expert ids in the order of their ranks; E, one past the last, for a
                dropped copy and padding.
            no_drop: the host knows that no entry says "none".
            world: the groups; rows go over ``ep``, and over ``etp`` whose ranks share each expert.
        """
        if world.group("tp_ep").size > 1:
            return self.send(RoutedTokens(x_TD, weights_TK, experts_TK, no_drop), world)
        order = sort_copies(experts_TK, self._experts, no_drop)
        # Not of the whole order, which would stay with it.
        again = partial(spread, token_R=order.token_R, row_TK=order.row_TK, complete=no_drop)
        return in_order(x_TD, weights_TK, order, no_drop)._replace(source=(x_TD, again))

    def combine(
        self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World = SINGLE_RANK
    ) -> Tensor:
        """Return ``out_TD``, the sum of each token's copies; weights are applied already."""
        if world.group("tp_ep").size > 1:
            return self.fetch(y_RD, handle, no_drop, world)
        token_R, row_TK = handle
        return collect(y_RD, token_R, row_TK, no_drop)

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Dispatch where experts are on other ranks too."""
        raise AssertionError("experts live on other ranks")

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Combine where experts are on other ranks too."""
        raise AssertionError("experts live on other ranks")


def permute(tokens: RoutedTokens, experts: int, rows: int | None = None) -> Dispatched:
    """Sort copies by the experts that are here: the last part of every dispatch.

    ``experts``, their number, stands for an entry whose expert is not here; ``rows`` says how many
    copies there are, where the host knows: T * K otherwise. The handle (token_R, row_TK) is what
    ``collect`` brings their results back with.
    """
    order = sort_copies(tokens.experts_TK, experts, tokens.no_drop)
    x_TD, weights_TK, _, no_drop = tokens
    return in_order(x_TD, weights_TK, order if rows is None else order.first(rows), no_drop)


def in_order(x_TD: Tensor, weights_TK: Tensor, order: Permutation, no_drop: bool) -> Dispatched:
    """Put copies in an order by expert; the handle is that of :func:`permute`."""
    x_RD, p_R = order.rows(x_TD, no_drop), order.entries(weights_TK, no_drop)
    return Dispatched(x_RD, order.offs_B, p_R, (order.token_R, order.row_TK))
