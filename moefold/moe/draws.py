"""Random numbers per row, independent of layout and recomputation."""

from torch import Tensor

from moefold.kernels.linear.product import RowTransform
from moefold.kernels.quantise.philox import MASK, chance
from moefold.layers.flow import Flow

JITTER = 1
DROP = 2
HASH = 3
SKEW = 4
"""Purposes of random numbers, each with its own stream."""


def uniform(flow: Flow, columns: int, layer: int, purpose: int, like: Tensor) -> Tensor:
    """Return uniform [T, columns] in [0, 1), keyed by seed, step, purpose, layer and row number."""
    key = (flow.precision_policy.seed * 8 + purpose) & MASK, layer
    return chance(flow.row_id_T, range(columns), key, flow.precision_policy.step).to(like.dtype)


def make_jitter(amount: float, layer: int, flow: Flow) -> RowTransform:
    """Return a function that multiplies rows by random factors in 1 - amount to 1 + amount."""

    def multiply(x_TD: Tensor) -> Tensor:
        chance_TD = uniform(flow, x_TD.shape[1], layer, JITTER, x_TD)
        return x_TD * chance_TD.mul_(2 * amount).add_(1 - amount)

    return multiply
