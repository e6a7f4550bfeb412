"""Base of dispatchers, which send token rows to the ranks of their experts and results back.

T rows, D hidden, K experts per token, E local experts, R rows after dispatch.

A dispatcher holds no state between ``dispatch`` and ``combine``: what ``combine`` needs is in the
handle, so the two can be run, recomputed and scheduled separately.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from moefold.comm.collectives import RowCodec
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.kernels.permute.gather import permute_rows, unpermute_rows
from moefold.layers.flow import SINGLE_RANK
from moefold.moe.dispatch.routing_plan import Permutation, RoutedTokens, sort_copies

Handle = tuple[Any, ...]
"""What ``dispatch`` passes to ``combine``: tensors on the rows' device, and host values."""
Config = TypeVar("Config", bound=Record)


class Dispatched(NamedTuple):
    """Result of dispatch: rows sorted by local expert."""

    x_RD: Tensor
    """Copies of token rows; rows past ``offs_E[-1]`` are unspecified and never read."""
    offs_E: Tensor
    """int32 end row of each expert."""
    probs_R: Tensor
    """Routing weight of each row, differentiable; unspecified past the last offset."""
    handle: Handle
    overflow: Tensor | None = None
    """int64 rows by which the fullest rank, or pair of ranks, exceeds its room; excess rows are
    missing. None if the dispatcher has no limit."""
    source: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None
    """A smaller tensor, and a function that recomputes ``x_RD`` from it."""
    row_number_R: Tensor | None = None
    """Number of each row in the step (micro-batch and position), for dropout and codes."""
    clones: Tensor | None = None
    """int64 [P, s] expert cloned in each slot of each rank. Rows for this rank's clones follow
    those for its own experts."""


class Dispatcher(Generic[Config]):
    """Base of all dispatchers, for local experts: ``dispatch`` and ``combine``.

    If all experts are local, dispatch is a permutation without host read or communication: copies
    are sorted by expert, then by token. A subclass defines how rows are sent to other ranks of
    ``ep`` and ``etp`` (``send``) and how results return (``fetch``).
    """

    wire: RowCodec | None = None
    """Codec of rows and of gradients of results; None sends them unquantised."""

    def __init__(self, record: Config, experts: int) -> None:
        self._record = record
        self._experts = experts

    def exchange_tokens(self, tokens: RoutedTokens, send: Callable[..., Tensor]) -> RoutedTokens:
        """Return rows (encoded by ``wire``), weights and expert ids after ``send``."""
        x_ND = send(tokens.x_TD, codec=self.wire)
        return RoutedTokens(x_ND, send(tokens.weights_TK), send(tokens.experts_TK))

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
            experts_TK: int64 expert ids in the order of their ranks; one past the last for dropped
                copies and padding ("none").
            no_drop: the host knows that no entry is "none".
            world: the groups: ``ep``, and ``etp``, whose ranks each hold a slice of an expert.
        """
        if world.group("tp_ep").size > 1:
            return self.send(RoutedTokens(x_TD, weights_TK, experts_TK, no_drop), world)
        order = sort_copies(experts_TK, self._experts, no_drop)
        # Bind only two tensors of the order, so the others are freed.
        recompute = partial(
            permute_rows, token_R=order.token_R, row_TK=order.row_TK, complete=no_drop
        )
        return sort_rows(x_TD, weights_TK, order, no_drop)._replace(source=(x_TD, recompute))

    def combine(
        self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World = SINGLE_RANK
    ) -> Tensor:
        """Return ``out_TD``, the sum of each token's results, which are already weighted."""
        if world.group("tp_ep").size > 1:
            return self.fetch(y_RD, handle, no_drop, world)
        token_R, row_TK = handle
        return unpermute_rows(y_RD, token_R, row_TK, no_drop)

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Dispatch to experts on several ranks."""
        raise AssertionError("this dispatcher needs all experts on one rank")

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Combine from experts on several ranks."""
        raise AssertionError("this dispatcher needs all experts on one rank")


def permute(tokens: RoutedTokens, experts: int, rows: int | None = None) -> Dispatched:
    """Sort copies by local expert: the last step of every dispatch.

    ``experts`` is the number of local experts and the id of entries for other ranks; ``rows`` is
    the number of copies if the host knows it, else T * K. The handle (token_R, row_TK) is the input
    of ``unpermute_rows``, which sums results by token.
    """
    order = sort_copies(tokens.experts_TK, experts, tokens.no_drop)
    x_TD, weights_TK, _, no_drop = tokens
    return sort_rows(x_TD, weights_TK, order if rows is None else order.first(rows), no_drop)


def sort_rows(x_TD: Tensor, weights_TK: Tensor, order: Permutation, no_drop: bool) -> Dispatched:
    """Return copies in ``order``, sorted by expert; the handle is that of :func:`permute`."""
    x_RD = order.rows(x_TD, no_drop)
    p_R = order.entries(weights_TK, no_drop)
    return Dispatched(x_RD, order.offs_B, p_R, (order.token_R, order.row_TK))
