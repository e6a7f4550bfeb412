"""Dropout that is a function of seed, step, weight, row and feature: the same in every layout."""

from typing import NamedTuple

from torch import Tensor

from moefold.kernels.quantise.philox import MASK, chance


class Dropout(NamedTuple):
    """Leaves features of rows out, and scales those that stay. As its own gradient it is linear.

    N rows, I features here. Calling it again gives the same features, so that none are kept.
    """

    rate: float
    """Share that is left out, in multiples of 2^-16."""
    key: tuple[int, int]
    """Of the run and of the weight that reads the rows."""
    step: int
    columns: range
    """Which of the weight's inputs are here."""
    number_N: Tensor
    """int64 number of each row in the step."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return rows [N, I]."""
        key = self.key[0] & MASK, self.key[1] & MASK
        drawn_NI = chance(self.number_N, self.columns, key, self.step)
        return x_NI.masked_fill(drawn_NI < self.rate, 0).mul_(1 / (1 - self.rate))
