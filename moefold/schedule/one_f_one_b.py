"""Schedules whose stages map to ranks round-robin, v times: GPipe and the 1F1B family.

Letters: p pipeline ranks, v stage chunks per rank, m micro-batches per step, groups of g
micro-batches. "In flight" is the number of chunks whose activations a rank saves at once; F, B, I
and W are the times of the actions of ``schedule.table``. Each function is the owner of one record:
it takes the record, p, v and m, and returns the table.

Micro-batches pass through several chunks in groups of g >= p: a group through chunk 0, then this
group through chunk 1, and so on (interleaved 1F1B, arXiv 2104.04473).
"""

import itertools
from collections import deque

from moefold.schedule.config import GPipe, Interleaved, Merged, OneFOneB, ZeroBubbleH1
from moefold.schedule.table import Action, Line, Pair, Table


def gpipe(record: GPipe, p: int, v: int, m: int) -> Table:
    """Return the table of GPipe (arXiv 1811.06965): all forwards, then all backwards.

    With several chunks per rank, breadth first (arXiv 2211.05953): a chunk's micro-batches, then
    the next chunk's. Bubble (p - 1)(F + B) for m >= p; all m * v chunks are in flight before the
    first backward. Every rank has the same line.
    """
    return Table((_build_line(m * v, v, m, m),) * p, v, m)


def one_f_one_b(record: OneFOneB, p: int, v: int, m: int) -> Table:
    """Return the table of 1F1B (PipeDream-flush, arXiv 2006.09503), one chunk per rank.

    Each backward runs as early as possible. Bubble (p - 1)(F + B), as GPipe's; rank r has
    min(m, p - r) micro-batches in flight.
    """
    return Table(tuple(_build_line(p - rank - 1, 1, m, m) for rank in range(p)), 1, m)


def interleaved(record: Interleaved, p: int, v: int, m: int) -> Table:
    """Return the table of interleaved 1F1B (arXiv 2104.04473); with v = 1 it is 1F1B itself.

    Bubble (p - 1)(F + B) of *one chunk*, a fraction (p - 1) / (v m) of the step. In flight on rank
    0: (v - 1) g + 2 (p - 1) + 1 chunks, for g = p 1 + (p - 1) / (p v) times the memory of 1F1B.
    """
    group = record.group_size(p, m)
    # An output passes all later ranks and its gradient returns before the rank's first backward:
    # two forwards per later rank. With a single chunk it is one.
    warmups = [p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * group for r in range(p)]
    return Table(tuple(_build_line(count, v, m, group) for count in warmups), v, m)


def merged(record: Merged, p: int, v: int, m: int) -> Table:
    """Return the table of combined 1F1B: each steady forward overlaps with another's backward.

    The exchanges of one micro-batch hide under the compute of the other; only the warm-up's
    forwards and the drain's backwards stay exposed (arXiv 2603.07685, section 4.2.3). The order is
    interleaved 1F1B's with one more forward in the warm-up, because a forward cannot overlap with
    its own backward. Each later rank adds two forwards, even with one chunk: a pair has no results
    before it ends. In flight on rank 0: (v - 1) g + 2 (p - 1) + 2 chunks. Works on one rank too.
    """
    group = record.group_size(p, m)
    warmups = [2 * (p - r - 1) + (v - 1) * group + 1 for r in range(p)]
    return Table(tuple(_build_line(count, v, m, group, paired=True) for count in warmups), v, m)


def _build_line(warmup: int, v: int, m: int, group: int, paired: bool = False) -> Line:
    """Return a line: ``warmup`` forwards, then a forward and a backward in turn or ``paired``."""
    forwards, backwards = _ordered_passes(v, m, group)
    warmup = min(warmup, m * v)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = itertools.starmap(Pair, pairs) if paired else itertools.chain.from_iterable(pairs)
    return (*forwards[:warmup], *steady, *backwards[m * v - warmup :])  # warm-up, steady, drain


def zb_h1(record: ZeroBubbleH1, p: int, v: int, m: int) -> Table:
    """Return the table of ZB-H1 (arXiv 2401.10241): weight gradients fill the bubbles of 1F1B.

    Rank r delays its weight gradients by r micro-batches, so that all ranks need the memory of rank
    0 in 1F1B (p v chunks) and gradients are sent sooner. Bubble, for m >= p: (p - 1)(F + I - W) if
    W is the shortest of the three; otherwise (p - 1) max(F, I), since weight gradients then delay
    other actions. With v > 1 chunks, the order of interleaved 1F1B with the shorter warm-up.
    """
    group = record.group_size(p, m)
    forwards, backwards = _ordered_passes(v, m, group)
    lines: list[Line] = []
    for rank in range(p):
        forward = deque(forwards)
        weights = deque[Action]()
        warmup = min((v - 1) * group + p - rank - 1, m * v)
        line = [forward.popleft() for _ in range(warmup)]  # 1. warm-up
        for backward in backwards:
            if forward:  # 2. steady: forward, input gradient, an earlier weight gradient
                line.append(forward.popleft())
            line.append(backward._replace(kind="I"))  # 3. drain: only input and weight gradients
            weights.append(backward._replace(kind="W"))
            if len(weights) > rank:
                line.append(weights.popleft())
        lines.append((*line, *weights))  # 4. the remaining weight gradients
    return Table(tuple(lines), v, m)


def _ordered_passes(v: int, m: int, group: int) -> tuple[list[Action], list[Action]]:
    """Return the forwards of a rank in order, and its backwards.

    Groups of micro-batches pass through all chunks, in backward through the last chunk first.
    """
    forwards = [
        Action("F", chunk, micro)
        for start in range(0, m, group)
        for chunk in range(v)
        for micro in range(start, min(start + group, m))
    ]
    return forwards, [Action("B", v - 1 - f.chunk, f.micro) for f in forwards]
