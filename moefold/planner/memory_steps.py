"""What a schedule's table says of memory: what each rank keeps while each of its steps runs.

A table repeats itself, so of thousands of steps few differ, and of those fewer can be the fullest.
Chunks are those of one rank, numbered along the model.
"""

from collections.abc import Iterable, Iterator
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
    begun: frozenset[int]
    """Chunks whose gradients are there before the step."""

    @property
    def frees(self) -> bool:
        """Whether activations go with the step, and gradients come."""
        return self.kind in ("B", "W")

    def covers(self, other: "Running") -> bool:
        """Return whether another step that runs the same passes needs no more than this one."""
        return self.begun >= other.begun and all(
            mine >= theirs for mine, theirs in zip(self.kept, other.kept, strict=True)
        )


def steps_of(line: Line, chunks: int) -> Iterator[Running]:
    """Yield the steps of a rank's line."""
    kept, begun = [0] * chunks, frozenset[int]()
    for step in line:
        forward = backward = None
        kind = ""
        for action in actions_of(step):
            if action.kind == "F":
                forward = action.chunk
            else:
                backward, kind = action.chunk, action.kind
        made = Running(forward, backward, kind, tuple(kept), begun)
        yield made
        if forward is not None:
            kept[forward] += 1
        if backward is not None and made.frees:
            kept[backward] -= 1
            begun |= {backward}


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
    return tuple(sorted(found, key=lambda one: -sum(one.kept)))
