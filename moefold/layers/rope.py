"""Rotary angles with plain frequencies, or scaled by YaRN (arXiv 2309.00071) or by bands."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.layers.config import Rope, Yarn


class Angles(NamedTuple):
    """Cosine and sine of each row's angles, [T, dim / 2], in the compute dtype."""

    cos_Tp: Tensor
    sin_Tp: Tensor

    @classmethod
    def of(cls, positions_T: Tensor, rope: Rope, dim: int, dtype: torch.dtype) -> "Angles":
        """Compute the angles of rows at ``positions_T`` for ``dim`` rotary dims.

        Angles are computed in fp32 for any compute dtype, as in every published model.
        """
        device = positions_T.device
        compute = _on_device if device.type == "cuda" else _frequencies
        frequencies = compute(rope, dim, device)
        angles_Tp = positions_T.float()[:, None] * frequencies
        magnitude = 1.0 if rope.yarn is None else rope.yarn.magnitude
        return cls((angles_Tp.cos() * magnitude).to(dtype), (angles_Tp.sin() * magnitude).to(dtype))


def _frequencies(rope: Rope, dim: int, device: torch.device) -> Tensor:
    return inverse_frequencies(rope, dim).to(device, non_blocking=True)


_on_device: Callable[[Rope, int, torch.device], Tensor] = lru_cache(maxsize=64)(_frequencies)  # type: ignore[assignment]
"""Cached, as the host waits for a copy to a GPU, and CUDA graphs cannot capture one. Records are
hashable, though their types do not say so."""


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Return the ``dim / 2`` angular frequencies, in radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    period = rope.theta**exponents
    if rope.yarn is not None:
        return _yarn_frequencies(period, rope.yarn, rope.theta, dim)
    plain = 1.0 / period
    if (bands := rope.bands) is None:
        return plain
    # Divide slow frequencies by ``factor``, leave fast ones, blend between the two boundaries.
    rotations = bands.original_length * plain / (2 * math.pi)
    fast_weight = ((rotations - bands.slow) / (bands.fast - bands.slow)).clamp(0, 1)
    return (1 - fast_weight) * plain / bands.factor + fast_weight * plain


def _yarn_frequencies(period: Tensor, yarn: Yarn, theta: float, dim: int) -> Tensor:
    """Interpolate slow dims by ``factor``, leave fast dims, blend between the two boundaries.

    Operations are rounded as in transformers, so that results are bitwise equal.
    """

    def dim_of(rotations: float) -> float:
        return (
            dim * math.log(yarn.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = dim_of(yarn.beta_fast)
    high = dim_of(yarn.beta_slow)
    if yarn.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = high - low if high > low else 0.001
    fast_weight = 1 - ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    return 1.0 / (yarn.factor * period) * (1 - fast_weight) + 1.0 / period * fast_weight
