"""How long a pipeline takes: closed forms, which tests hold to the simulator over the tables that
training executes. A schedule without one is simulated.
"""

from collections.abc import Sequence

from moefold.planner.case import table_of
from moefold.planner.remember import remembered
from moefold.schedule.config import (
    DualPipeV,
    GPipe,
    Interleaved,
    Merged,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.schedule.simulate import Costs, simulate

STEADY = (OneFOneB, Interleaved, Merged, GPipe)
"""Schedules whose ranks work without a gap once filled."""
FILLING = 1 / 3
"""Of a micro-batch's work, its forward: backward is taken as twice as long, half of that for
gradients of weights."""
IDLE: dict[type[Schedule], float] = {
    **dict.fromkeys(STEADY, 1.0),
    ZeroBubbleH1: FILLING,
    ZeroBubbleV: FILLING,
    DualPipeV: 2 * FILLING,
}
"""Of a chunk's work, what a rank is idle for each other rank that fills and drains before it."""
LEAST = min(IDLE.values())


def pipeline_seconds(schedule: Schedule, m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the seconds of m micro-batches.

    Beyond filling and draining, each takes the slowest rank's time. Where ranks work without a gap
    once filled, filling and draining pass each other rank once, a chunk each.

    Args:
        v: chunks per rank.
        ranks: seconds of a micro-batch's forward and backward over all chunks of each rank.
    """
    p, slowest, whole = len(ranks), max(ranks), sum(ranks)
    if isinstance(schedule, STEADY):
        passed = (whole - slowest) / v
        return m * slowest + passed + _short(schedule, p, v, m) * whole / p
    return m * slowest + idle(schedule, p, v, m) * whole / p


def idle(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return by how much a table of equal stages is longer than its work, in micro-batches."""
    if p == 1:
        return 0.0
    share = IDLE.get(type(schedule))
    if share is None:
        return _simulated(schedule, p, v, m)
    return share * (p - 1) / v + _short(schedule, p, v, m)


def _short(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return what it is longer where there are fewer micro-batches than ranks."""
    missing = max(0, p - m)
    if isinstance(schedule, ZeroBubbleH1):
        # Gradients of weights do not fill what is idle.
        return missing * FILLING
    # All chunks but one wait for the first micro-batch to come round.
    return missing * (v - 1) / v if isinstance(schedule, GPipe) else 0.0


@remembered(1024)
def _simulated(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return the same by simulating the table, of its filling, two rounds and its draining."""
    short = min(m, 4 * p)
    table = table_of(schedule, p, v, short)
    return simulate(table, Costs(*(FILLING / v,) * 3)).makespan - short
