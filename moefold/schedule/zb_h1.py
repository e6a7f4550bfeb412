"""ZB-H1 (arXiv 2401.10241): weight gradients wait, and fill what 1F1B leaves idle.

Rank r puts its weight gradients off by r micro-batches, so that all ranks keep what rank 0 of 1F1B
keeps (p v chunks) and gradients are passed on sooner. Bubble (p - 1)(F + I - W) where W is the
shortest of the three; otherwise (p - 1) max(F, I), for then weight gradients stand in the way. That
is from m = p on. With v > 1 chunks the order of interleaved 1F1B with the shorter warm-up.
"""

from collections import deque

from moefold.schedule.config import ZeroBubbleH1
from moefold.schedule.interleaved import order
from moefold.schedule.table import Action, Line, Table


def table(record: ZeroBubbleH1, p: int, v: int, m: int) -> Table:
    """Return the table."""
    group = record.grouped(p, m)
    return Table(tuple(_line(rank, p, v, m, group) for rank in range(p)), v, m)


def _line(rank: int, p: int, v: int, m: int, group: int) -> Line:
    forward = deque(order(v, m, group))
    weights: deque[tuple[int, int]] = deque()
    ahead = min((v - 1) * group + p - rank - 1, m * v)
    line = [Action("F", *forward.popleft()) for _ in range(ahead)]  # 1. warm-up
    for spot in order(v, m, group, backward=True):
        if forward:  # 2. steady: forward, input gradient, a weight gradient put off before
            line.append(Action("F", *forward.popleft()))
        line.append(Action("I", *spot))  # 3. drain: the same without forwards
        weights.append(spot)
        if len(weights) > rank:
            line.append(Action("W", *weights.popleft()))
    line += [Action("W", *spot) for spot in weights]  # 4. the rest of the weight gradients
    return tuple(line)
