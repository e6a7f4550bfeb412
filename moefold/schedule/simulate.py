"""Simulation of a table: an order in which it can run, its timeline, and the ranks' idle time.

Ranks follow their lines and start a step as soon as its inputs are available. All times are in one
arbitrary unit.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moefold.schedule.table import ActionResult, Step, Table, actions_of


class Deadlock(ValueError):
    """Ranks wait for each other: no order runs the table to its end."""


@dataclass(frozen=True)
class StageCosts:
    """Times of one stage for one micro-batch; B takes the sum of I and W."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def duration_of(self, kind: str) -> float:
        """Return the time of an action."""
        inputs = self.backward_input
        weights = self.backward_weight
        return {"F": self.forward, "I": inputs, "W": weights, "B": inputs + weights}[kind]


@dataclass(frozen=True)
class Span:
    """A step with its start and end."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation: the spans of every rank, in order."""

    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(line[-1].end for line in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time each rank spends in its steps."""
        return tuple(sum(span.end - span.start for span in line) for line in self.spans)


def simulate(table: Table, costs: StageCosts | Sequence[StageCosts] | None = None) -> Timeline:
    """Return the timeline of a table, with messages that take no time.

    Args:
        costs: one for all stages (default: F = I = W = 1), or one per stage.

    Raises:
        Deadlock: if the table cannot run to its end.
    """
    costs = StageCosts() if costs is None else costs
    per_stage = [costs] * table.stages if isinstance(costs, StageCosts) else costs
    if len(per_stage) != table.stages:
        raise ValueError(f"costs of {len(per_stage)} stages, but the table has {table.stages}")
    spans: list[list[Span]] = [[] for _ in range(table.ranks)]
    available_at: dict[ActionResult, float] = {}
    for rank, step in topological_steps(table):
        idle_from = spans[rank][-1].end if spans[rank] else 0.0
        start = max([idle_from, *(available_at[x] for x in table.step_inputs(rank, step))])
        passes = ((table.stage_of(rank, action.chunk), action.kind) for action in actions_of(step))
        end = start + sum(per_stage[stage].duration_of(kind) for stage, kind in passes)
        spans[rank].append(Span(step, start, end))
        available_at.update(dict.fromkeys(table.step_results(rank, step), end))
    return Timeline(tuple(map(tuple, spans)))


def topological_steps(table: Table) -> Iterator[tuple[int, Step]]:
    """Yield (rank, step) in each rank's order, with every step after those that produce its inputs.

    Raises:
        Deadlock: if a step's input is never produced, with each stuck rank and what it waits for.
    """
    available: set[ActionResult] = set()
    waiting: dict[ActionResult, list[int]] = {}
    position = [0] * table.ranks
    ready = deque(range(table.ranks))
    while ready:
        rank = ready.popleft()
        line = table.lines[rank]
        while position[rank] < len(line):
            step = line[position[rank]]
            missing = next((x for x in table.step_inputs(rank, step) if x not in available), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            yield rank, step
            for result in table.step_results(rank, step):
                available.add(result)
                ready.extend(waiting.pop(result, ()))
    stuck = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
    if stuck:
        raise Deadlock(
            "; ".join(
                f"rank {rank} stays at {table.lines[rank][position[rank]]} and waits for "
                f"the {missing.kind} of stage {missing.stage}, micro-batch {missing.micro}"
                for rank, missing in stuck
            )
        )
