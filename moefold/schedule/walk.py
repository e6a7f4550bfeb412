"""Walks a table in an order in which it can run; the simulator and the checker lean on it."""

from collections import deque
from collections.abc import Iterator

from moefold.schedule.table import Result, Step, Table, actions_of


class Deadlock(ValueError):
    """Ranks that wait for each other: no order runs the table to its end."""


def needs_of(table: Table, rank: int, step: Step) -> tuple[Result, ...]:
    """Return what must be there before a step starts; a pair waits for both of its inputs."""
    return tuple(need for action in actions_of(step) for need in table.needs(rank, action))


def gives_of(table: Table, rank: int, step: Step) -> tuple[Result, ...]:
    """Return what is there once a step has ended."""
    given = (table.gives(rank, action) for action in actions_of(step))
    return tuple(result for result in given if result is not None)


def walk(table: Table) -> Iterator[tuple[int, Step]]:
    """Yield (rank, step) so that each rank's order holds and every input is there.

    Raises:
        Deadlock: where some step's input never comes, naming each stuck rank and what it awaits.
    """
    done: set[Result] = set()
    waiting: dict[Result, list[int]] = {}
    at = [0] * table.ranks
    ready = deque(range(table.ranks))
    while ready:
        rank = ready.popleft()
        line = table.lines[rank]
        while at[rank] < len(line):
            step = line[at[rank]]
            missing = next((n for n in needs_of(table, rank, step) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            yield rank, step
            for result in gives_of(table, rank, step):
                done.add(result)
                ready.extend(waiting.pop(result, ()))
    if waiting:
        raise Deadlock("; ".join(_stuck(table, at, waiting)))


def _stuck(table: Table, at: list[int], waiting: dict[Result, list[int]]) -> Iterator[str]:
    for rank, missing in sorted((rank, need) for need, ranks in waiting.items() for rank in ranks):
        step = table.lines[rank][at[rank]]
        awaited = f"the {missing.what} of stage {missing.stage}, micro-batch {missing.micro}"
        yield f"rank {rank} stays at {step} and waits for {awaited}"
