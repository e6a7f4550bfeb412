"""Alignment of parameters and balanced assignment to ranks, for training and plans."""

from collections.abc import Sequence

ALIGN = 64
"""Alignment, in elements, of parameters and runs: 128 bytes in bf16, best for matrix products."""


def aligned(count: int) -> int:
    """Round up to a multiple of ``ALIGN``."""
    return -(-count // ALIGN) * ALIGN


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign items to ranks, largest first, each to the least loaded rank; return the owners."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += sizes[i]
    return owners
