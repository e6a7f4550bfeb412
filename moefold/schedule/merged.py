"""Merged forward-backward 1F1B: each steady forward runs beside a backward of another micro-batch.

The exchanges of one hide under the work of the other; only the warm-up's forwards and the drain's
backwards stay exposed (arXiv 2603.07685, section 4.2.3). The order is interleaved 1F1B's with one
more forward in the warm-up, because a forward cannot run beside a backward that needs it. Every
rank below adds two forwards, with one chunk too: a pair gives nothing before it ends. In flight on
rank 0: (v - 1) g + 2 (p - 1) + 2 chunks. One rank is enough.
"""

from moefold.schedule.config import Merged
from moefold.schedule.interleaved import order
from moefold.schedule.table import Action, Line, Pair, Step, Table


def table(record: Merged, p: int, v: int, m: int) -> Table:
    """Return the table."""
    group = record.grouped(p, m)
    return Table(tuple(_line(rank, p, v, m, group) for rank in range(p)), v, m)


def _line(rank: int, p: int, v: int, m: int, group: int) -> Line:
    forward = [Action("F", *spot) for spot in order(v, m, group)]
    backward = [Action("B", *spot) for spot in order(v, m, group, backward=True)]
    ahead = min(2 * (p - rank - 1) + (v - 1) * group + 1, m * v)
    warm_up: list[Step] = [*forward[:ahead]]
    steady = [Pair(*both) for both in zip(forward[ahead:], backward, strict=False)]
    return (*warm_up, *steady, *backward[m * v - ahead :])
