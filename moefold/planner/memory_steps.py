"""Actions of a rank's line in the table by what memory depends on; candidates for the peak."""

from collections.abc import Iterator
from operator import ge
from typing import NamedTuple

from moefold.planner.case import table_of
from moefold.planner.remember import remembered
from moefold.schedule.config import Schedule
from moefold.schedule.table import Line, actions_of


class Running(NamedTuple):
    """An action (or pair) of a rank's line, reduced to what its memory depends on."""

    forward: int | None
    """Chunk whose forward runs."""
    backward: int | None
    """Chunk whose backward runs."""
    kind: str
    """``B``, ``I`` or ``W`` of ``backward``, else empty."""
    kept: tuple[int, ...]
    """Micro-batches with saved activations before the action, by chunk."""
    waiting: tuple[int, ...]
    """Micro-batches with deferred weight gradients before the action, by chunk."""
    begun: frozenset[int]
    """Chunks whose gradients are allocated before the action."""

    @property
    def frees(self) -> bool:
        """Whether the action frees activations."""
        return self.kind in ("B", "I")

    @property
    def adds(self) -> bool:
        """Whether the action computes weight gradients."""
        return self.kind in ("B", "W")

    def covers(self, other: "Running") -> bool:
        """Return whether another action that runs the same passes needs at most as much memory."""
        mine, theirs = self.kept + self.waiting, other.kept + other.waiting
        return self.begun >= other.begun and all(map(ge, mine, theirs))


def steps_of(line: Line, chunks: int) -> Iterator[Running]:
    """Yield the actions of a rank's line."""
    kept, waiting, begun = [0] * chunks, [0] * chunks, frozenset[int]()
    for step in line:
        forward = backward = None
        kind = ""
        for action in actions_of(step):
            if action.kind == "F":
                forward = action.chunk
            else:
                backward, kind = action.chunk, action.kind
        made = Running(forward, backward, kind, tuple(kept), tuple(waiting), begun)
        yield made
        if forward is not None:
            kept[forward] += 1
        if backward is not None:
            kept[backward] -= made.frees
            waiting[backward] += (kind == "I") - (kind == "W")
            begun |= {backward} if made.adds else set()


@remembered(1024)
def fullest_steps(schedule: Schedule, p: int, v: int, m: int) -> tuple[tuple[Running, ...], ...]:
    """Return for each rank the actions that no other covers, the likely peak first; one of them is
    the peak.
    """
    ranks = list[tuple[Running, ...]]()
    for line in table_of(schedule, p, v, m).lines:
        alike: dict[tuple[int | None, int | None, str], list[Running]] = {}
        for step in dict.fromkeys(steps_of(line, v)):
            group = alike.setdefault(step[:3], [])
            if not any(one.covers(step) for one in group):
                group[:] = [one for one in group if not step.covers(one)] + [step]
        found = (one for group in alike.values() for one in group)
        ranks.append(tuple(sorted(found, key=lambda one: -sum(one.kept + one.waiting))))
    return tuple(ranks)
