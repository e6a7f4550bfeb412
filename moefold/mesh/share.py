"""How ranks share elements and things among them: what training does and plans count."""

from collections.abc import Sequence

ALIGN = 64
"""Elements to a multiple of which parameters and runs begin: 128 bytes in bf16, as products like
them best."""


def aligned(count: int) -> int:
    """Return the next multiple of ``ALIGN``."""
    return -(-count // ALIGN) * ALIGN


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return an owner for each thing: the largest first, each to the rank that has least."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += sizes[i]
    return owners
