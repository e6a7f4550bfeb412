"""The table of a pipeline schedule: what every rank does, in order.

Letters: p pipeline ranks, v stage chunks per rank, m micro-batches. The p * v stages are numbered
along the model; a rank's chunks are numbered along the model too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from moefold.mesh.pipeline import Way, home

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward of inputs and weights; backward of inputs alone; of weights alone."""


class Action(NamedTuple):
    """One pass over one chunk of the rank for one micro-batch."""

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + ("" if self.chunk == 0 else f"'{self.chunk}")


class Pair(NamedTuple):
    """A forward and a backward of two micro-batches that run side by side.

    Each computes while the other one waits for its exchanges between ranks. Both inputs must be
    there before the pair starts; both results are there when it ends.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Pair
Line = tuple[Step, ...]


class ActionResult(NamedTuple):
    """What an action leaves for others: the output of a stage, or the gradient of its input."""

    what: Literal["output", "gradient"]
    stage: int
    micro: int


def actions_of(step: Step) -> tuple[Action, ...]:
    """Return the one or two actions of a step; the forward of a pair is the first."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


@dataclass(frozen=True)
class Table:
    """A schedule: one line of steps per rank, and where the stages lie."""

    lines: tuple[Line, ...]
    chunks: int
    micro_batches: int
    way: Way = "round"

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.lines)

    @property
    def stages(self) -> int:
        """The number of stages, p * v."""
        return self.ranks * self.chunks

    @cached_property
    def has_pairs(self) -> bool:
        """Whether any rank runs a forward beside a backward."""
        return any(isinstance(step, Pair) for line in self.lines for step in line)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in order, those of a pair one after the other."""
        for step in self.lines[rank]:
            yield from actions_of(step)

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that a chunk of a rank is."""
        start = chunk * self.ranks
        return start + self.home(start + rank)  # a turn is its own inverse

    def home(self, stage: int) -> int:
        """Return the rank on which a stage lies."""
        return home(stage, self.ranks, self.way)

    def needs(self, rank: int, action: Action) -> tuple[ActionResult, ...]:
        """Return what must be there before an action starts, own results included."""
        stage, micro = self.stage(rank, action.chunk), action.micro
        if action.kind == "F":
            return (ActionResult("output", stage - 1, micro),) if stage else ()
        own = ActionResult("output", stage, micro)
        if action.kind == "W":
            return own, ActionResult("gradient", stage, micro)
        last = stage == self.stages - 1
        return (own,) if last else (own, ActionResult("gradient", stage + 1, micro))

    def gives(self, rank: int, action: Action) -> ActionResult | None:
        """Return what an action leaves for others; weight gradients stay where they are."""
        if action.kind == "W":
            return None
        what = "output" if action.kind == "F" else "gradient"
        return ActionResult(what, self.stage(rank, action.chunk), action.micro)

    def step_needs(self, rank: int, step: Step) -> tuple[ActionResult, ...]:
        """Return what must be there before a step starts; a pair waits for both of its inputs."""
        return tuple(need for action in actions_of(step) for need in self.needs(rank, action))

    def step_gives(self, rank: int, step: Step) -> tuple[ActionResult, ...]:
        """Return what a step leaves for others once it has ended."""
        given = (self.gives(rank, action) for action in actions_of(step))
        return tuple(result for result in given if result is not None)

    def reader(self, result: ActionResult) -> int | None:
        """Return the rank that reads a result, None past either end of the model."""
        stage = result.stage + (1 if result.what == "output" else -1)
        return self.home(stage) if 0 <= stage < self.stages else None
