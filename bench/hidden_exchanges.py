"""What the pairs of a schedule's table hide of exchanges between ranks, at the most.

A pair's two actions share one device and one network: neither can do two things at once, and
neither action is shorter than its own parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moefold.schedule.simulate import StageCosts
from moefold.schedule.table import Table, actions_of


class Exchanges(NamedTuple):
    """How long a stage computes for one micro-batch, and waits for others of its place."""

    work: StageCosts
    forward: float
    backward: float

    def took(self, kind: str) -> tuple[float, float]:
        """Return the times of an action; weight gradients exchange nothing."""
        waits = {"F": self.forward, "W": 0.0}.get(kind, self.backward)
        return self.work.duration_of(kind), waits


def duration(took: Sequence[tuple[float, float]]) -> float:
    """Return how long a step lasts whose actions take these (computing, exchanging) times."""
    device, network = (sum(one) for one in zip(*took, strict=True))
    return max(device, network, *(sum(one) for one in took))


def hidden(table: Table, stages: Sequence[Exchanges]) -> tuple[float, ...]:
    """Return the share of each rank's exchanging time that hides under other work."""
    found = []
    for rank, line in enumerate(table.lines):
        steps = [
            [stages[table.stage_of(rank, one.chunk)].took(one.kind) for one in actions_of(step)]
            for step in line
        ]
        work, exchange = (sum(both[i] for took in steps for both in took) for i in (0, 1))
        found.append(1 - (sum(map(duration, steps)) - work) / exchange)
    return tuple(found)
