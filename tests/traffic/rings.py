"""Which rows of a context rank another one sees, in a zigzag of a micro-batch's rows.

Of ``2 * ranks`` pieces rank r holds piece r and piece ``2 * ranks - 1 - r``. Between two ranks at
most one segment is seen; ``layers.context.visibility`` is the same with the rows that see.
"""

from collections.abc import Sequence
from itertools import accumulate


def lent(lengths: Sequence[int], rows: int, ranks: int, owner: int, asking: int) -> int:
    """Return how many rows of ``owner`` the rank ``asking`` sees.

    Args:
        lengths: rows of each segment of the micro-batch, in order.
        rows: rows of each rank.
        ranks: that share the micro-batch.
    """
    piece = rows // 2
    # The segment that reaches from a piece of the one into a later piece of the other.
    row = (owner + 1) * piece - 1 if owner < asking else (2 * ranks - 1 - asking) * piece
    start = 0
    for end in accumulate(lengths):
        if row < end:
            break
        start = end
    else:
        return 0

    def inside(number: int) -> int:
        return max(0, min(end, (number + 1) * piece) - max(start, number * piece))

    first, second = inside(owner), inside(2 * ranks - 1 - owner)
    if owner < asking:
        seeing = inside(asking) + inside(2 * ranks - 1 - asking)
        return first if seeing else 0
    return first + second if inside(2 * ranks - 1 - asking) else 0
