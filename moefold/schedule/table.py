"""The table of a pipeline schedule: each rank's actions, in order.

Letters: p pipeline ranks, v stage chunks per rank, m micro-batches. The p * v stages, and the
chunks of each rank, are numbered in model order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from moefold.mesh.pipeline import StageMapping, rank_of_stage

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward of inputs and weights; backward of inputs alone; of weights alone."""


class Action(NamedTuple):
    """One pass of a micro-batch through one chunk of the rank."""

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + ("" if self.chunk == 0 else f"'{self.chunk}")


class Pair(NamedTuple):
    """A forward and a backward of two micro-batches that run concurrently.

    Each computes while the other waits for exchanges between ranks. The pair starts when both
    inputs are available; both results are available when it ends.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Pair
Line = tuple[Step, ...]


class ActionResult(NamedTuple):
    """Result of an action for other stages: a stage's output, or the gradient of its input."""

    kind: Literal["output", "gradient"]
    stage: int
    micro: int


def actions_of(step: Step) -> tuple[Action, ...]:
    """Return the one or two actions of a step; the forward of a pair is the first."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


@dataclass(frozen=True)
class Table:
    """A schedule: one line of steps per rank, and the mapping of stages to ranks."""

    lines: tuple[Line, ...]
    chunks: int
    micro_batches: int
    stage_mapping: StageMapping = "round"

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
        """Whether any rank runs a forward concurrently with a backward."""
        return any(isinstance(step, Pair) for line in self.lines for step in line)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in order, the forward of a pair first."""
        for step in self.lines[rank]:
            yield from actions_of(step)

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage number of a rank's chunk."""
        start = chunk * self.ranks
        return start + self.rank_of(start + rank)  # each chunk's mapping is its own inverse

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return rank_of_stage(stage, self.ranks, self.stage_mapping)

    def action_inputs(self, rank: int, action: Action) -> tuple[ActionResult, ...]:
        """Return the results that an action needs, including those of its own stage."""
        stage = self.stage_of(rank, action.chunk)
        micro = action.micro
        if action.kind == "F":
            return (ActionResult("output", stage - 1, micro),) if stage else ()
        own = ActionResult("output", stage, micro)
        if action.kind == "W":
            return own, ActionResult("gradient", stage, micro)
        last = stage == self.stages - 1
        return (own,) if last else (own, ActionResult("gradient", stage + 1, micro))

    def action_result(self, rank: int, action: Action) -> ActionResult | None:
        """Return an action's result for other stages; None for weight gradients."""
        if action.kind == "W":
            return None
        kind = "output" if action.kind == "F" else "gradient"
        return ActionResult(kind, self.stage_of(rank, action.chunk), action.micro)

    def step_inputs(self, rank: int, step: Step) -> tuple[ActionResult, ...]:
        """Return the results that a step needs before it starts, for a pair those of both."""
        return tuple(x for action in actions_of(step) for x in self.action_inputs(rank, action))

    def step_results(self, rank: int, step: Step) -> tuple[ActionResult, ...]:
        """Return a step's results, available once it has ended."""
        results = (self.action_result(rank, action) for action in actions_of(step))
        return tuple(result for result in results if result is not None)

    def reader_rank(self, result: ActionResult) -> int | None:
        """Return the rank that reads a result; None at either end of the model."""
        stage = result.stage + (1 if result.kind == "output" else -1)
        return self.rank_of(stage) if 0 <= stage < self.stages else None
