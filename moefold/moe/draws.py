"""Random numbers of rows that depend neither on the layout nor on recomputation."""

from torch import Tensor

from moefold.kernels.linear.product import RowTransform
from moefold.kernels.quantise.philox import MASK, chance
from moefold.layers.flow import Flow

JITTER, DROP, HASH, SKEW = 1, 2, 3, 4
"""Purposes of random numbers, each with a stream of its own."""


def drawn(flow: Flow, columns: int, layer: int, purpose: int, like: Tensor) -> Tensor:
    """Return uniform [T, columns] in [0, 1), keyed by seed, step, purpose, layer and row number."""
    key = (flow.recipe.seed * 8 + purpose) & MASK, layer
    return chance(flow.number_T, range(columns), key, flow.recipe.step).to(like.dtype)


def jitter(amount: float, layer: int, flow: Flow) -> RowTransform:
    """Return a function that multiplies rows by random factors in 1 - amount to 1 + amount."""

    def times(x_TD: Tensor) -> Tensor:
        chance_TD = drawn(flow, x_TD.shape[1], layer, JITTER, x_TD)
        return x_TD * chance_TD.mul_(2 * amount).add_(1 - amount)

    return times
