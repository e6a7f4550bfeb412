"""How long a pipeline takes: a closed form where it holds, else by its own table.

The closed form is of schedules whose ranks work without a gap once filled. Both are held by tests
to the simulator, over the tables that training executes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from moefold.planner.case import table_of
from moefold.schedule.config import GPipe, Interleaved, Merged, OneFOneB, Schedule
from moefold.schedule.simulate import Costs, simulate

STEADY = (OneFOneB, Interleaved, Merged, GPipe)
WEIGHT_SHARE = 0.5
"""Of a backward's products that make gradients of weights."""


def is_steady(schedule: Schedule) -> bool:
    """Return whether a schedule has the closed form of :func:`steady_seconds`."""
    return isinstance(schedule, STEADY)


def steady_seconds(m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the seconds of m micro-batches.

    Filling and draining pass the other ranks once, a chunk each; between, the slowest rank is
    never idle.

    Args:
        v: chunks per rank.
        ranks: seconds of a micro-batch's forward and backward over all chunks of each rank.
    """
    slowest = max(ranks)
    return m * slowest + (sum(ranks) - slowest) / v


def table_seconds(schedule: Schedule, m: int, v: int, ranks: Sequence[float]) -> float:
    """Return the same of any schedule, from its table: all that it leaves idle, at equal stages.

    Beyond filling and draining, each micro-batch takes the slowest rank's time.
    """
    return m * max(ranks) + idle_of(cast("Any", schedule), len(ranks), v, m) * sum(ranks) / len(
        ranks
    )


@lru_cache(maxsize=1024)
def idle_of(schedule: Schedule, p: int, v: int, m: int) -> float:
    """Return by how much a table is longer than its work, in micro-batches of one rank.

    The table is simulated with backwards twice as long as forwards, half of them for gradients of
    weights, and shortened to its filling, two rounds and its draining.
    """
    short = min(m, 4 * p)
    table = table_of(schedule, p, v, short)
    half = 2 / 3 / v * WEIGHT_SHARE
    return simulate(table, Costs(1 / 3 / v, half, half)).makespan - short
