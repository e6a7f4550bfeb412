"""Philox4x32-10: random bits as a function of a key and a counter (Salmon et al., SC 2011)."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LANES = 8
"""16-bit numbers per counter."""
CHUNK = 1 << 18
"""Numbers computed at once; temporaries take 30 bytes for each."""


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32 random bits each.

    Args:
        counter: four int64 tensors of 32-bit words, with shapes that broadcast.
        key: two 32-bit words.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        left = _product(a, MULTIPLIERS[0])
        right = _product(c, MULTIPLIERS[1])
        a = right[0] ^ b ^ first
        b = right[1]
        c = left[0] ^ d ^ second
        d = left[1]
        first = (first + WEYL[0]) & MASK
        second = (second + WEYL[1]) & MASK
    return a, b, c, d


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of the product, which int64 holds as a signed number."""
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


def chance(row_N: Tensor, columns: range, key: tuple[int, int], word: int = 0) -> Tensor:
    """Return random fp32 multiples of 2^-16 in [0, 1) of shape [N, columns].

    Each depends only on key, word, the number of its row (int64, not negative) and its column.
    """
    first = columns.start // LANES
    group = torch.arange(first, -(-columns.stop // LANES), device=row_N.device)
    start = columns.start - first * LANES
    chunks = list[Tensor]()
    for row_B in row_N.split(max(CHUNK // max(len(columns), 1), 1)):
        low = row_B[:, None] & MASK
        high = row_B[:, None] >> 32
        words = torch.full_like(low, word & MASK)
        bits = torch.stack(torch.broadcast_tensors(*philox((group, low, high, words), key)), -1)
        halves = torch.stack((bits & 0xFFFF, bits >> 16), -1).flatten(1)
        chunks.append(halves[:, start : start + len(columns)].float().mul_(2.0**-16))
    return torch.cat(chunks)
