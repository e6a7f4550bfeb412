"""E4M3 with dynamic range expansion: a power of magnitudes maps each group's range to that of E4M3.

COAT (arXiv 2410.19313): ``code = sign(x) (|x| / middle)^power / scale``, where ``middle`` is the
geometric mean of a group's largest and smallest magnitudes, and ``power``, in sixteenths, is the
largest that fits their ratio into the range of E4M3. Zeros remain zeros, and no other number
becomes zero. Rounding is to nearest, or stochastic, which preserves the mean. Numbers are fp32;
powers and logarithms are computed in fp64 and rounded, as the last bit of fp32 ones depends on the
position in a tensor. A group with a NaN or an Inf is decoded to NaN.

G groups of N numbers.
"""

import math

import torch
from torch import Tensor

from moefold.kernels.quantise.elements import E4M3, LARGEST, cast

LOG2_RANGE = math.log2(LARGEST[E4M3] ** 2 / 2)
"""Logarithm (base 2) of the largest ratio of a group's largest and smallest codes."""
STEPS = 16
"""Powers are multiples of ``1 / STEPS``."""
MAX_POWER = 1024.0
"""Largest power, for groups with almost equal magnitudes: higher ones lose digits of fp32."""
LARGEST_CODE = 126
"""Bits of the code of 448."""
MIN_RATIO = 2.0**-100
"""Smallest magnitudes are at least the largest times ``MIN_RATIO**2``, as powers have a minimum."""


def extremes(x_GN: Tensor) -> Tensor:
    """Return fp32 [G, 2]: the largest magnitude, and minus the smallest nonzero one.

    Both can be reduced over parts of a group by maximum; the latter is -Inf for zeros. NaN is Inf.
    """
    size = x_GN.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = torch.where(size > 0, size, torch.inf).amin(1)
    return torch.stack((size.amax(1), -least), 1)


def factors(extremes_G2: Tensor) -> Tensor:
    """Return scale, middle and power of each group, fp32 [G, 3], from :func:`extremes`."""
    high = extremes_G2[:, 0]
    low = -extremes_G2[:, 1]
    nonzero = high > 0
    high = torch.where(nonzero, high, 1)
    low = torch.where(nonzero, low, 1)
    low = torch.maximum(low, high * MIN_RATIO * MIN_RATIO)
    middle = high.sqrt() * low.sqrt()
    span = high.double().log2() - low.double().log2()
    power = torch.div(torch.full_like(span, LOG2_RANGE), span).mul_(STEPS).floor_().div_(STEPS)
    power = torch.where(high == low, 1, power).clamp_(1 / STEPS, MAX_POWER).float()
    scale = _power(high / middle, power) / LARGEST[E4M3]
    return torch.stack((torch.where(high.isfinite(), scale, torch.nan), middle, power), 1)


def encode(x_GN: Tensor, factors_G3: Tensor, chance_GN: Tensor | None = None) -> Tensor:
    """Return E4M3 codes [G, N], rounded to nearest.

    With ``chance_GN``, multiples of 2^-16 in [0, 1), rounding is stochastic: up with the
    probability of a number's distance from the decoded code below.
    """
    scale, middle, power = factors_G3[..., None].unbind(1)
    size = x_GN.float().abs()
    expanded = _power(size / middle, power) / scale
    code = cast(expanded, E4M3)
    bits = code.view(torch.uint8)  # in the order of the numbers
    if chance_GN is not None:
        below = bits - (code.float() > expanded).to(torch.uint8)
        above = (below + 1).clamp_(max=LARGEST_CODE)
        low, high = (decode(codes.view(E4M3), factors_G3) for codes in (below, above))
        # Plus half a step, so that decoded numbers keep their codes in spite of rounding.
        up = size - low > (chance_GN + 2.0**-17) * (high - low)
        bits = torch.where(up, above, below)
    return bits.bitwise_or_(x_GN.signbit().to(torch.uint8) << 7).view(E4M3)


def decode(codes_GN: Tensor, factors_G3: Tensor) -> Tensor:
    """Return the fp32 numbers of codes."""
    scale, middle, power = factors_G3[..., None].unbind(1)
    expanded = codes_GN.float() * scale
    return _power(expanded.abs(), 1 / power.double()).copysign_(expanded).mul_(middle)


def _power(x: Tensor, power: Tensor) -> Tensor:
    return (x.double() ** power).float()
