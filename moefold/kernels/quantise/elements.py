"""Low-precision elements and scales: conversion of fp32 numbers to codes and back.

E4M3 and E5M2 are torch's dtypes; no Inf may reach their cast, which makes it the largest
number. E2M1 has no cast in torch: its codes are 4 bits (sign, then magnitude), two per byte, the
first in the low half. E8M0 is a power of two by its biased exponent (OCP Microscaling formats 1.0).
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LARGEST_E2M1 = 6.0
EXPONENT = 0x7F800000
"""Mask of the exponent bits of an fp32 number."""


def cast(x: Tensor, element: torch.dtype) -> Tensor:
    """Round ``x`` to E4M3 or E5M2, to nearest even, saturating at the largest number."""
    return x.clamp(-LARGEST[element], LARGEST[element]).to(element)


def cast_e2m1(x: Tensor, chance: Tensor | None = None) -> Tensor:
    """Return E2M1 codes of numbers clamped to ±6, one per byte, rounded to nearest even.

    Args:
        x: fp32.
        chance: multiples of 2^-16 in [0, 1) for stochastic rounding: a number is rounded up with
            the probability of its distance from the code below; exact numbers are unchanged.
    """
    size = x.abs().clamp_(max=LARGEST_E2M1)
    # Codes 0..4 are in steps of 0.5, 4..6 in steps of 1 from 2 on, 6 and 7 in steps of 2 from 4 on.
    from_2, from_4 = ((size >= least).to(torch.uint8) for least in (2, 4))
    count = size.mul_(2).div_(1 + from_2 + 2 * from_4)
    count = count.round_() if chance is None else count.add_(chance).floor_()
    codes = count.to(torch.uint8).add_(from_2, alpha=2).add_(from_4, alpha=2)
    return codes.bitwise_or_(x.signbit().to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte along the last dim, which is even."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack to one 4-bit code per byte, doubling the last dim."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of unpacked E2M1 codes."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    signed = torch.tensor([*table, *(-size for size in table)], dtype=dtype, device=codes.device)
    return signed.index_select(0, codes.flatten().int()).view(codes.shape)


def floor_power_of_2(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most ``x``, for normal fp32; NaN becomes Inf."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


def ceil_exponent(x: Tensor) -> Tensor:
    """Return the biased exponent, 0..254, of the smallest power of two >= ``x >= 0``.

    It is 255 for Inf and NaN. (An fp32 logarithm would round numbers just above a power.)
    """
    bits = x.view(torch.int32)
    exponent = bits >> 23
    rest = bits & 0x7FFFFF
    least = torch.where(exponent == 0, 1 << 22, 0)  # 2^-127 is a subnormal of fp32
    above = exponent + (rest > least).int()
    return torch.where(exponent == 255, 255, above.clamp_(max=254)).to(torch.uint8)


def floor_exponent(x: Tensor, largest: int) -> Tensor:
    """Return the biased exponent of ``x >= 0`` minus ``largest``, 0..254; 255 for Inf and NaN."""
    exponent = x.view(torch.int32) >> 23
    return torch.where(exponent == 255, 255, (exponent - largest).clamp_(min=0)).to(torch.uint8)


def power_of_2(exponent: Tensor) -> Tensor:
    """Return ``2^(exponent - 127)`` in fp32, exact down to 2^-127; NaN for 255."""
    return exponent.view(E8M0).float()
