"""1F1B (PipeDream-flush, arXiv 2006.09503): the earliest backward that can run, runs.

Bubble (p - 1)(F + B), as GPipe's; rank r keeps min(m, p - r) micro-batches in flight.
"""

from moefold.schedule.config import OneFOneB
from moefold.schedule.table import Action, Line, Table


def table(record: OneFOneB, p: int, v: int, m: int) -> Table:
    """Return the table."""
    return Table(tuple(_line(rank, p, m) for rank in range(p)), chunks=1, micro_batches=m)


def _line(rank: int, p: int, m: int) -> Line:
    ahead = min(p - rank - 1, m)
    line = [Action("F", 0, micro) for micro in range(ahead)]  # 1. warm-up
    for micro in range(m - ahead):  # 2. one forward, one backward
        line += [Action("F", 0, micro + ahead), Action("B", 0, micro)]
    line += [Action("B", 0, micro) for micro in range(m - ahead, m)]  # 3. drain
    return tuple(line)
