"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

With several chunks per rank, breadth first (arXiv 2211.05953): a chunk's micro-batches, then the
next chunk's. Bubble (p - 1)(F + B) from m = p on; all m * v chunks are in flight at the turn.
"""

from moefold.schedule.config import GPipe
from moefold.schedule.table import Action, Line, Table


def table(record: GPipe, p: int, v: int, m: int) -> Table:
    """Return the table; every rank has the same line."""
    forward = [Action("F", chunk, micro) for chunk in range(v) for micro in range(m)]
    backward = [Action("B", chunk, micro) for chunk in reversed(range(v)) for micro in range(m)]
    line: Line = (*forward, *backward)
    return Table((line,) * p, chunks=v, micro_batches=m)
