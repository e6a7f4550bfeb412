"""Products on codes in plain torch, on any device: what every back end computes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised


class Use(NamedTuple):
    """What a product asks of a back end."""

    kind: str
    scales: str
    """The rule for scales."""
    published: bool
    """Whether blocks are as long as published ones."""
    product: str
    """``y``, ``dx`` or ``dw``."""
    grouped: bool
    """Whether each group has a matrix of its own."""
    dtype: torch.dtype
    """Of the rows."""
    device: torch.device


class Emulated:
    """Codes become numbers, which are multiplied; also the base of the other back ends.

    Codes times block scales are summed (fp64 for rows in fp64, else fp32); scales of whole matrices
    come after the sum.
    """

    name = "emulated"
    remedy = ""
    """How to get it."""

    def missing(self, device: torch.device) -> str:
        """Say why it is not there; empty where it is."""
        return ""

    def why_not(self, use: Use) -> str:
        """Say why it does not take a product; empty where it does."""
        return ""

    def times(self, a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b`` in ``dtype``, blocks of both along K."""
        wide = torch.promote_types(dtype, torch.float32)
        y_NM = a_NK.factors(wide) @ b_KM.factors(wide)
        for after in (a_NK.after, b_KM.after):
            if after is not None:
                y_NM *= after
        return y_NM.to(dtype)

    def each(
        self,
        made: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix.

        Args:
            made: codes [N, K] of runs, sorted by group.
            weight_KM: the matrix, or [E, K, M] of all groups.
            groups: of each run.
            dtype: of the products.
        """
        found = []
        for group, one in zip(groups, made, strict=True):
            matrix = weight_KM.matrix(group) if len(weight_KM.shape) == 3 else weight_KM
            empty = one.codes.new_empty(0, matrix.shape[-1], dtype=dtype)
            found.append(self.times(one, matrix, dtype) if one.shape[0] else empty)
        return found
