"""E4M3 with an expanded range: a power of a group's magnitudes spreads them over it.

COAT (arXiv 2410.19313): ``code = sign(x) (|x| / middle)^power / scale``, where ``middle`` is the
geometric mean of a group's largest and least magnitude, and ``power``, in sixteenths, is the
largest that keeps those two apart by no more than E4M3 tells apart. Zeros stay zeros, and nothing
else becomes one. Numbers become the nearest code, or by chance one of the two beside them, so that
their mean is kept. Numbers are fp32; powers and logarithms are taken in fp64 and rounded, as fp32's
last bit differs by where in a tensor they stand. A group with a NaN or an Inf reads back as NaN.

G groups of N numbers.
"""

import math

import torch
from torch import Tensor

from moefold.kernels.quantise.elements import E4M3, LARGEST, cast

SPREAD = math.log2(LARGEST[E4M3] ** 2 / 2)
"""Logarithm of how far apart a group's largest and least code may be."""
STEPS = 16
"""Powers are multiples of one over this."""
MOST_POWER = 1024.0
"""Of groups whose magnitudes hardly differ: a higher one loses fp32's digits."""
LARGEST_CODE = 126
"""Bits of the code of 448."""
LEAST = 2.0**-100
"""Magnitudes below its square times the largest count as that: a power has a least one."""


def extremes(x_GN: Tensor) -> Tensor:
    """Return fp32 [G, 2]: the largest magnitude, and less the least that is not zero.

    Both are maxima over parts of a group; -Inf where all is zero. A NaN counts as an Inf.
    """
    size = x_GN.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = torch.where(size > 0, size, torch.inf).amin(1)
    return torch.stack((size.amax(1), -least), 1)


def factors(extremes_G2: Tensor) -> Tensor:
    """Return fp32 [G, 3] of what :func:`extremes` found: scale, middle and power of each group."""
    high, low = extremes_G2[:, 0], -extremes_G2[:, 1]
    some = high > 0
    high, low = torch.where(some, high, 1), torch.where(some, low, 1)
    low = torch.maximum(low, high * LEAST * LEAST)
    middle = high.sqrt() * low.sqrt()
    apart = high.double().log2() - low.double().log2()
    power = torch.div(torch.full_like(apart, SPREAD), apart).mul_(STEPS).floor_().div_(STEPS)
    power = torch.where(high == low, 1, power).clamp_(1 / STEPS, MOST_POWER).float()
    scale = _power(high / middle, power) / LARGEST[E4M3]
    return torch.stack((torch.where(high.isfinite(), scale, torch.nan), middle, power), 1)


def encode(x_GN: Tensor, factors_G3: Tensor, chance_GN: Tensor | None = None) -> Tensor:
    """Return E4M3 codes of the same shape, to nearest.

    With ``chance_GN``, multiples of 2^-16 in [0, 1), a number becomes the code above it with the
    probability of its distance from what the code below stands for.
    """
    scale, middle, power = factors_G3[..., None].unbind(1)
    size = x_GN.float().abs()
    spread = _power(size / middle, power) / scale
    code = cast(spread, E4M3)
    bits = code.view(torch.uint8)  # In the order of the numbers.
    if chance_GN is not None:
        below = bits - (code.float() > spread).to(torch.uint8)
        above = (below + 1).clamp_(max=LARGEST_CODE)
        low, high = (decode(one.view(E4M3), factors_G3) for one in (below, above))
        # Half a step more: what a code stands for stays, in fp32's last bit too.
        up = size - low > (chance_GN + 2.0**-17) * (high - low)
        bits = torch.where(up, above, below)
    return bits.bitwise_or_(x_GN.signbit().to(torch.uint8) << 7).view(E4M3)


def decode(codes_GN: Tensor, factors_G3: Tensor) -> Tensor:
    """Return the fp32 numbers that codes stand for."""
    scale, middle, power = factors_G3[..., None].unbind(1)
    spread = codes_GN.float() * scale
    return _power(spread.abs(), 1 / power.double()).copysign_(spread).mul_(middle)


def _power(x: Tensor, power: Tensor) -> Tensor:
    return (x.double() ** power).float()
