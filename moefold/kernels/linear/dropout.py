"""Dropout as a pure function of seed, step, weight, row and feature: equal in every layout."""

from typing import NamedTuple

from torch import Tensor

from moefold.kernels.quantise.philox import MASK, chance


class Dropout(NamedTuple):
    """Zeroes features of rows and scales the others; applied to gradients, it is its own backward.

    N rows, I features on this rank. The mask is recomputed in each call, so that none is saved.
    """

    rate: float
    """Fraction of features that are zeroed, in multiples of 2^-16."""
    key: tuple[int, int]
    """Key of the run and of the weight that reads the rows."""
    step: int
    columns: range
    """Indices of the weight's inputs on this rank."""
    number_N: Tensor
    """int64 number of each row in the step."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return rows [N, I] with dropout."""
        key = self.key[0] & MASK, self.key[1] & MASK
        random_NI = chance(self.number_N, self.columns, key, self.step)
        return x_NI.masked_fill(random_NI < self.rate, 0).mul_(1 / (1 - self.rate))
