"""Actions of a rank in the schedule's table as memory depends on them; candidates for the peak."""

from collections.abc import Iterator
from itertools import chain
from operator import ge
from typing import NamedTuple

from moefold.planner.case import Case, equivalent_micro_batches, schedule_table
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

    def has_begun(self, chunk: int) -> bool:
        """Return whether a forward of the chunk has run before the action."""
        return bool(self.saved[chunk] or self.deferred[chunk]) or chunk in self.with_gradients

    def dominates(self, other: "RunningAction") -> bool:
        """Return whether another action that runs the same passes needs at most as much memory."""
        counts = self.saved + self.deferred
        other_counts = other.saved + other.deferred
        return self.with_gradients >= other.with_gradients and all(map(ge, counts, other_counts))


def running_actions(line: Line, chunks: int) -> Iterator[RunningAction]:
    """Yield the actions of a rank's line in the table, which has ``chunks`` chunks."""
    saved = [0] * chunks
    deferred = [0] * chunks
    begun = frozenset[int]()
    for step in line:
        forward = backward = None
        kind = ""
        for action in actions_of(step):
            if action.kind == "F":
                forward = action.chunk
            else:
                backward = action.chunk
                kind = action.kind
        running = RunningAction(forward, backward, kind, tuple(saved), tuple(deferred), begun)
        yield running
        if forward is not None:
            saved[forward] += 1
        if backward is not None:
            saved[backward] -= running.frees_activations
            deferred[backward] += (kind == "I") - (kind == "W")
            begun |= {backward} if running.computes_weight_gradients else set()


Candidates = tuple[tuple[RunningAction, ...], ...]
"""Actions of each rank, one of which is its peak; the likely one first."""


def peak_candidates(case: Case) -> Candidates:
    """Return for each rank the actions that no other dominates; a cached object."""
    m = equivalent_micro_batches(case.schedule, case.sizes.pp, case.num_micro_batches)
    return _candidates(case.schedule, case.sizes.pp, case.sizes.vpp, m)


@memoize(1024)
def _candidates(schedule: Schedule, p: int, v: int, m: int) -> Candidates:
    ranks = list[tuple[RunningAction, ...]]()
    for line in schedule_table(schedule, p, v, m).lines:
        by_passes: dict[tuple[int | None, int | None, str], list[RunningAction]] = {}
        for action in dict.fromkeys(running_actions(line, v)):
            group = by_passes.setdefault(action[:3], [])
            if not any(other.dominates(action) for other in group):
                group[:] = [other for other in group if not action.dominates(other)] + [action]
        candidates = chain.from_iterable(by_passes.values())
        most_passes_first = sorted(candidates, key=lambda a: -sum(a.saved + a.deferred))
        ranks.append(tuple(most_passes_first))
    return tuple(ranks)
