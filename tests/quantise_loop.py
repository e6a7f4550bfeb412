"""Quantisers written number by number from the formats' definitions: what fast ones are held to.

Slow on purpose: a loop over blocks, and exact fractions where something is rounded to a code.
"""

from bisect import bisect
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moefold.kernels.quantise.blocks import Format

F32 = np.float32


@cache
def table(element: torch.dtype | None) -> list[tuple[Fraction, int]]:
    """Return the magnitudes that an element has, and their codes, in order."""
    if element is None:
        sizes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
        return [(Fraction(size), code) for code, size in enumerate(sizes)]
    numbers = torch.arange(128, dtype=torch.uint8).view(element).double()
    return [(Fraction(x), code) for code, x in enumerate(numbers.tolist()) if abs(x) < 1e9]


def nearest(x: float, sizes: list[tuple[Fraction, int]], sign_bit: int) -> int:
    """Return the code nearest to ``x``; the even one of two as near; the last beyond the end."""
    sign = sign_bit if np.signbit(x) else 0
    size = Fraction(abs(float(x)))
    at = bisect(sizes, (size, 0))
    best = min(sizes[max(at - 2, 0) : at + 2], key=lambda it: (abs(it[0] - size), it[1] % 2))
    return best[1] | sign


def power_down(x: float) -> float:
    """Return the largest power of two up to ``x``."""
    return float(2.0 ** (np.frexp(x)[1] - 1))


def decoded(x: Tensor, form: Format) -> tuple[np.ndarray, np.ndarray, float]:
    """Return codes (one a byte), what codes and scales of blocks stand for in fp64, and one factor.

    ``x`` is one finite fp32 matrix, blocks lie along its last dim. Numbers times the factor, which
    is the scale of the matrix, are those that the codes stand for.
    """
    numbers = x.numpy()
    rows, columns = numbers.shape
    tall, long = form.rows or rows, form.columns or columns
    sizes, sign_bit = table(form.element), 8 if form.element is None else 128
    codes = np.zeros(numbers.shape, np.uint8)
    read = np.zeros(numbers.shape, np.float64)
    value = {code: float(size) for size, code in sizes}
    largest = F32(float(sizes[-1][0]))
    spread = F32(1)
    if form.kind == "nvfp4":
        with np.errstate(divide="ignore", over="ignore"):
            spread = min(F32(448 * 6) / F32(abs(numbers).max()), np.finfo(F32).max)
    scale = 1.0
    for i, j in np.ndindex(-(-rows // tall), -(-columns // long)):
        part = (slice(i * tall, (i + 1) * tall), slice(j * long, (j + 1) * long))
        amax = F32(abs(numbers[part]).max())
        with np.errstate(all="ignore"):
            factor, scale = _factor(amax, largest, form.scales, spread)
        for at in np.ndindex(numbers[part].shape):
            with np.errstate(all="ignore"):
                scaled = F32(numbers[part][at] * factor)
            code = nearest(min(max(scaled, -largest), largest), sizes, sign_bit)
            codes[part][at] = code
            sign = -1 if code & sign_bit else 1
            whole = form.columns is None
            read[part][at] = sign * value[code & ~sign_bit] * (1.0 if whole else scale)
    return codes, read, scale if form.columns is None else float(F32(1) / F32(spread))


def _factor(
    amax: np.float32, largest: np.float32, scales: str, spread: np.float32
) -> tuple[np.float32, float]:
    """Return what numbers of a block are multiplied by, and what reads them back."""
    if scales == "e4m3":
        wanted = min(amax * F32(spread * (F32(1) / F32(6))), F32(448))
        sizes = table(torch.float8_e4m3fn)
        code = nearest(float(wanted), sizes, 128)
        scale = F32(next(float(size) for size, other in sizes if other == code))
        return min(F32(1) / F32(scale * (F32(1) / spread)), np.finfo(F32).max), float(scale)
    if scales in ("fp32", "power"):
        factor = F32(1) if amax == 0 else min(largest / amax, np.finfo(F32).max)
        factor = F32(power_down(factor)) if scales == "power" else factor
        return factor, float(F32(1) / factor)
    if amax == 0:
        exponent = -127
    elif scales == "floor":
        exponent = max(np.frexp(float(amax))[1] - 1 - 8, -127)
        exponent = max(exponent, -127) if amax >= 2.0**-126 else -127
    else:
        wanted = Fraction(float(F32(amax / largest)))
        exponent = -127
        while Fraction(2) ** exponent < wanted:
            exponent += 1
    return F32(2.0**-exponent), 2.0**exponent
