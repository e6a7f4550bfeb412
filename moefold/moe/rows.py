"""Tensors passed from one step of an MoE layer to the next.

T rows, D hidden, K experts per token, R rows after dispatch, N router terms.
"""

from typing import NamedTuple

from torch import Tensor

from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.routing_plan import RoutedTokens


class MoeInput(NamedTuple):
    """Input of the layer."""

    residual_TD: Tensor
    """Residual rows, to which the output is added."""
    x_TD: Tensor
    """Normed rows: input of router and experts."""


class RoutedRows(NamedTuple):
    """Output of ``route``, input of ``dispatch``."""

    residual_TD: Tensor
    x_TD: Tensor
    terms_N: Tensor
    """Values of the router's loss terms, without coefficients."""
    weights_TK: Tensor
    experts_TK: Tensor
    """int64 expert ids; E for copies that are not sent."""
    inner_TL: Tensor | None = None
    """Rows projected to the latent width, sent instead of ``x_TD``."""


class DispatchedRows(NamedTuple):
    """Output of ``dispatch``, input of the experts."""

    residual_TD: Tensor
    x_TD: Tensor
    """Rows of this rank: input of the shared expert."""
    terms_N: Tensor
    sent: Dispatched | RoutedTokens
    """Rows from all ranks for this rank's experts, or this rank's rows to be sent in rounds."""


class ExpertRows(NamedTuple):
    """Output of the experts, input of ``combine``."""

    residual_TD: Tensor
    """Residual rows, plus the shared expert's output unless ``shared_TD`` holds it."""
    shared_TD: Tensor | None
    """Output of the shared expert if the block norms the sum before adding it."""
    terms_N: Tensor
    y_RD: Tensor
    handle: Handle


class SeparateOutput(NamedTuple):
    """Output of the layer if the block norms it before adding it to the residual."""

    residual_TD: Tensor
    added_TD: Tensor
    terms_N: Tensor
