"""Actions of a rank's line in the table by what memory depends on; candidates for the peak."""

from collections.abc import Iterator
from operator import ge
from typing import NamedTuple

from moefold.planner.case import table_of
from moefold.planner.memoize import memoize
from moefold.schedule.config import Schedule
from moefold.schedule.table import Line, actions_of


class RunningAction(NamedTuple):
    """An action (or pair) of a rank's line, reduced to what its memory depends on."""

    forward: int | None
    """Chunk whose forward runs."""
    backward: int | None
    """Chunk whose backward runs."""
    kind: str
    """``B``, ``I`` or ``W`` of ``backward``, else empty."""
    saved: tuple[int, ...]
    """Micro-batches with saved activations before the action, by chunk."""
    deferred: tuple[int, ...]
    """Micro-batches with deferred weight gradients before the action, by chunk."""
    with_gradients: frozenset[int]
    """Chunks whose gradients are allocated before the action."""

    @property
    def frees_activations(self) -> bool:
        """Whether the action frees activations."""
        return self.kind in ("B", "I")

    @property
    def computes_weight_gradients(self) -> bool:
        """Whether the action computes weight gradients."""
        return self.kind in ("B", "W")

    def dominates(self, other: "RunningAction") -> bool:
        """Return whether another action that runs the same passes needs at most as much memory."""
        mine, theirs = self.saved + self.deferred, other.saved + other.deferred
        return self.with_gradients >= other.with_gradients and all(map(ge, mine, theirs))


def running_actions(line: Line, chunks: int) -> Iterator[RunningAction]:
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
        made = RunningAction(forward, backward, kind, tuple(kept), tuple(waiting), begun)
        yield made
        if forward is not None:
            kept[forward] += 1
        if backward is not None:
            kept[backward] -= made.frees_activations
            waiting[backward] += (kind == "I") - (kind == "W")
            begun |= {backward} if made.computes_weight_gradients else set()


@memoize(1024)
def peak_candidates(
    schedule: Schedule, p: int, v: int, m: int
) -> tuple[tuple[RunningAction, ...], ...]:
    """Return for each rank the actions that no other covers, the likely peak first; one of them is
    the peak.
    """
    ranks = list[tuple[RunningAction, ...]]()
    for line in table_of(schedule, p, v, m).lines:
        alike: dict[tuple[int | None, int | None, str], list[RunningAction]] = {}
        for step in dict.fromkeys(running_actions(line, v)):
            group = alike.setdefault(step[:3], [])
            if not any(one.dominates(step) for one in group):
                group[:] = [one for one in group if not step.dominates(one)] + [step]
        found = (one for group in alike.values() for one in group)
        ranks.append(tuple(sorted(found, key=lambda one: -sum(one.saved + one.deferred))))
    return tuple(ranks)
