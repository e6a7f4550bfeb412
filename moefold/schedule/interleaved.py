"""Interleaved 1F1B (arXiv 2104.04473): v chunks per rank, so that the bubble is v times shorter.

Micro-batches go through the chunks in groups of g >= p: a group through chunk 0, the same group
through chunk 1, and so on. Bubble (p - 1)(F + B) of *one chunk*, a share (p - 1) / (v m) of the
step. In flight on rank 0: (v - 1) g + 2 (p - 1) + 1 chunks, which for g = p is 1 + (p - 1) / (p v)
times what 1F1B keeps. With v = 1 it is 1F1B itself.
"""

from moefold.schedule.config import Interleaved
from moefold.schedule.table import Action, Line, Table


def table(record: Interleaved, p: int, v: int, m: int) -> Table:
    """Return the table."""
    group = record.grouped(p, m)
    return Table(tuple(_line(rank, p, v, m, group) for rank in range(p)), v, m)


def order(v: int, m: int, group: int, backward: bool = False) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in the order of every rank's forwards or backwards."""
    chunks = range(v)[::-1] if backward else range(v)
    return [
        (chunk, micro)
        for start in range(0, m, group)
        for chunk in chunks
        for micro in range(start, min(start + group, m))
    ]


def _line(rank: int, p: int, v: int, m: int, group: int) -> Line:
    forward = [Action("F", *spot) for spot in order(v, m, group)]
    backward = [Action("B", *spot) for spot in order(v, m, group, backward=True)]
    # A chunk's output goes round all ranks before the rank sees the first gradient: two forwards
    # per rank below it. A single chunk sees it sooner.
    ahead = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * group
    ahead = min(ahead, m * v)
    line = forward[:ahead]  # 1. warm-up
    for following, ended in zip(forward[ahead:], backward, strict=False):  # 2. steady
        line += [following, ended]
    line += backward[m * v - ahead :]  # 3. drain
    return tuple(line)
