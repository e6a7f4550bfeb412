"""How long a pipeline takes: closed forms where they hold, else its own table, simulated.

The closed forms are of schedules whose ranks work without a gap once filled. They are held to the
simulator by tests, over the same tables that training executes.
"""

from collections.abc import Sequence

from moefold.planner.case import table_of
from moefold.schedule.config import GPipe, Interleaved, Merged, OneFOneB, Schedule
from moefold.schedule.simulate import Costs, simulate

STEADY = (OneFOneB, Interleaved, Merged, GPipe)
WEIGHT_SHARE = 0.5
"""Of a backward's products that make gradients of weights."""


def pipeline_seconds(
    schedule: Schedule,
    v: int,
    m: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
) -> float:
    """Return the seconds of all micro-batches of a step.

    Args:
        v: chunks per rank.
        m: micro-batches.
        forward: seconds of each chunk of each pipeline rank: ``[rank][chunk]``.
        backward: the same, of inputs and weights together.
    """
    p = len(forward)
    ranks = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    if p == 1:
        return m * ranks[0]
    if isinstance(schedule, STEADY):
        return _steady(m, v, ranks)
    return _simulated(schedule, v, m, forward, backward)


def _steady(m: int, v: int, ranks: Sequence[float]) -> float:
    """Fill and drain pass the other ranks once per chunk; between, the slowest is never idle."""
    slowest = max(ranks)
    others = sum(ranks) - slowest
    return m * slowest + others / v


def _simulated(
    schedule: Schedule,
    v: int,
    m: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
) -> float:
    """Simulate a table shortened to its filling, two rounds and its draining.

    Beyond, each further micro-batch takes the slowest rank's time.
    """
    p = len(forward)
    short = min(m, 4 * p)
    table = table_of(schedule, p, v, short)
    costs: list[Costs] = [Costs()] * table.stages
    for rank in range(p):
        for chunk in range(v):
            back = backward[rank][chunk]
            costs[table.stage(rank, chunk)] = Costs(
                forward[rank][chunk], back * (1 - WEIGHT_SHARE), back * WEIGHT_SHARE
            )
    slowest = max(sum(f) + sum(b) for f, b in zip(forward, backward, strict=True))
    return simulate(table, costs).makespan + (m - short) * slowest
