"""The steps of a rank's line by what its memory depends on, and those that can be the fullest."""

from collections.abc import Iterable, Iterator
from operator import ge
from typing import NamedTuple

from moefold.planner.case import table_of
from moefold.planner.remember import remembered
from moefold.schedule.config import Schedule
from moefold.schedule.table import Line, actions_of


class Running(NamedTuple):
    """A step of a rank's line, by what its memory depends on."""

    forward: int | None
    """The chunk that goes forward."""
    backward: int | None
    """The chunk that goes back."""
    kind: str
    """``B``, ``I`` or ``W`` of that."""
    kept: tuple[int, ...]
    """Micro-batches whose activations are there before the step, by chunk."""
    waiting: tuple[int, ...]
    """Micro-batches whose weights' products wait before the step, by chunk."""
    begun: frozenset[int]
    """Chunks whose gradients are there before the step."""

    @property
    def frees(self) -> bool:
        """Whether activations go with the step."""
        return self.kind in ("B", "I")

    @property
    def adds(self) -> bool:
        """Whether gradients of weights come with the step."""
        return self.kind in ("B", "W")

    def covers(self, other: "Running") -> bool:
        """Return whether another step that runs the same passes needs no more than this one."""
        mine, theirs = self.kept + self.waiting, other.kept + other.waiting
        return self.begun >= other.begun and all(map(ge, mine, theirs))


def steps_of(line: Line, chunks: int) -> Iterator[Running]:
    """Yield the steps of a rank's line."""
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
    """Return of each rank the steps that no other covers: one of them is the fullest, most likely
    one of the first.
    """
    table = table_of(schedule, p, v, m)
    return tuple(_uncovered(steps_of(line, v)) for line in table.lines)


def _uncovered(steps: Iterable[Running]) -> tuple[Running, ...]:
    alike: dict[tuple[int | None, int | None, str], list[Running]] = {}
    for step in dict.fromkeys(steps):
        group = alike.setdefault(step[:3], [])
        if not any(one.covers(step) for one in group):
            group[:] = [one for one in group if not step.covers(one)] + [step]
    found = (one for group in alike.values() for one in group)
    return tuple(sorted(found, key=lambda one: -sum(one.kept + one.waiting)))
