"""What travels from one part of a mixture-of-experts layer to the next.

T rows, D hidden, K experts per token, R rows after dispatch, N router terms.
"""

from typing import NamedTuple

from torch import Tensor

from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.routing_plan import RoutedTokens


class MoeInput(NamedTuple):
    """What the layer takes."""

    residual_TD: Tensor
    """What the layer's output is added to."""
    x_TD: Tensor
    """Normed rows, which router and experts read."""


class RoutedRows(NamedTuple):
    """What ``route`` hands to ``dispatch``."""

    residual_TD: Tensor
    x_TD: Tensor
    terms_N: Tensor
    """Values of the router's loss terms, without coefficients."""
    weights_TK: Tensor
    experts_TK: Tensor
    """int64; E for copies that are not sent."""
    inner_TL: Tensor | None = None
    """What is sent in place of the rows."""


class DispatchedRows(NamedTuple):
    """What ``dispatch`` hands to the experts."""

    residual_TD: Tensor
    x_TD: Tensor
    """Rows of this rank, which the shared expert reads."""
    terms_N: Tensor
    sent: Dispatched | RoutedTokens
    """Rows of the experts here, from all ranks; or this rank's, to be sent in rounds."""


class ExpertRows(NamedTuple):
    """What the experts hand to ``combine``."""

    residual_TD: Tensor
    """With the shared expert's output, unless the block adds to the residual."""
    shared_TD: Tensor | None
    """That output in the other case."""
    terms_N: Tensor
    y_RD: Tensor
    handle: Handle


class Apart(NamedTuple):
    """What ``combine`` returns where the block adds to the residual."""

    residual_TD: Tensor
    added_TD: Tensor
    terms_N: Tensor
