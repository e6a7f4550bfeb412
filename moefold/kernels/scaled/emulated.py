"""Products of low-precision codes in plain torch, on any device: the reference of all back ends."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Quantised


class ProductSpec(NamedTuple):
    """Properties of a product that decide which back ends support it."""

    kind: str
    scales: str
    """The rule for scales."""
    published: bool
    """Whether blocks have the published length."""
    product: str
    """``y``, ``dx`` or ``dw``."""
    grouped: bool
    """Whether each group has its own matrix."""
    dtype: torch.dtype
    """dtype of the rows."""
    device: torch.device


class Emulated:
    """Dequantises codes and multiplies them; also the base class of the other back ends.

    Factors are codes times block scales, summed in fp32 (fp64 for rows in fp64); scales of whole
    matrices are applied to the sum.
    """

    name = "emulated"
    remedy = ""
    """How to make the back end available, for error messages."""

    def why_unavailable(self, device: torch.device) -> str:
        """Return why the back end is not available on a device; empty if it is."""
        return ""

    def why_unsupported(self, spec: ProductSpec) -> str:
        """Return why a product is not supported; empty if it is."""
        return ""

    def multiply(self, a_NK: Quantised, b_KM: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b`` in ``dtype``; blocks of both are along K."""
        wide = torch.promote_types(dtype, torch.float32)
        y_NM = a_NK.factors(wide) @ b_KM.factors(wide)
        for scale in (a_NK.output_scale, b_KM.output_scale):
            if scale is not None:
                y_NM *= scale
        return y_NM.to(dtype)

    def multiply_runs(
        self,
        runs: Sequence[Quantised],
        weight_KM: Quantised,
        groups: list[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each run's product with its matrix.

        Args:
            runs: codes [N, K] of each run, sorted by group.
            weight_KM: the matrix, or [E, K, M] for all groups.
            groups: group of each run.
            dtype: dtype of the results.
        """
        products = []
        for group, run in zip(groups, runs, strict=True):
            matrix = weight_KM.matrix(group) if len(weight_KM.shape) == 3 else weight_KM
            empty = run.codes.new_empty(0, matrix.shape[-1], dtype=dtype)
            products.append(self.multiply(run, matrix, dtype) if run.shape[0] else empty)
        return products
