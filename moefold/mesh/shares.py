"""How ranks divide a number of things among them, evenly or not."""

import math


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def largest_share(number: int, ranks: int) -> int:
    """Return how many of ``number`` things the fullest of ``ranks`` ranks has."""
    return -(-number // ranks)


def share(number: int, ranks: int, index: int) -> tuple[int, int]:
    """Return the half-open range of things of rank ``index``.

    Ranges follow each other in the order of ranks. Their lengths differ by at most one, and the
    longer ones come first.
    """
    each, longer = divmod(number, ranks)
    start = index * each + min(index, longer)
    return start, start + each + (index < longer)
