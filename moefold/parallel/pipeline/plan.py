"""A table from the view of one rank: its line, and what crosses to and from its neighbours when.

Between two ranks each direction is one channel on which messages keep their order: outputs and
gradients have the same shape, and NCCL knows no tags, so a message is told by its place alone. The
receiver therefore posts receives in the order in which the *sender* sends, which both read off the
table; a result that comes early is held until its step. Receives and sends never block the host,
so no order of steps that the table allows can deadlock, on gloo or on NCCL: there each pair of
ranks has a communicator of its own per direction (``Group.back``), as long as communicators are
made lazily (no ``device_id`` where ranks join), and one direction never waits behind the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from moefold.parallel.config import Layout
from moefold.schedule.table import Line, Result, Table


@dataclass(frozen=True)
class Plan:
    """What one rank does in a step of training."""

    table: Table
    rank: int
    posts: tuple[tuple[Result, ...], ...]
    """Receives to post for each of the rank's steps, in the order in which they were sent."""
    given_at: dict[Result, int]
    """For a result that comes from another rank, the step of that rank's line that gives it."""
    read_at: dict[Result, int]
    """For a result that goes to another rank, the step of that rank's line that reads it."""

    @property
    def line(self) -> Line:
        """The rank's steps."""
        return self.table.lines[self.rank]

    @property
    def splits(self) -> bool:
        """Whether this rank runs weight gradients apart."""
        return any(action.kind == "W" for action in self.table.actions(self.rank))


@lru_cache(maxsize=8)
def plan(layout: Layout, rank: int, micro_batches: int) -> Plan:
    """Return the plan of a pipeline rank; the same for every step of so many micro-batches."""
    return of_table(layout.table(micro_batches), rank)


def of_table(table: Table, rank: int) -> Plan:
    """Return a rank's part of a table."""
    stages = [table.stage(rank, chunk) for chunk in range(table.chunks)]
    near = {stage + way for stage in stages for way in (-1, 1)} & set(range(table.stages))
    peers = {table.home(stage) for stage in near} - {rank}
    coming = {peer: list(_crossing(table, peer, rank)) for peer in peers}
    given_at = {result: at for sent in coming.values() for result, at in sent}
    read_at = {
        need: at
        for peer in peers
        for at, step in enumerate(table.lines[peer])
        for need in table.step_needs(peer, step)
        if table.home(need.stage) == rank
    }
    queues = {peer: [result for result, _ in sent] for peer, sent in coming.items()}
    return Plan(table, rank, tuple(_posts(table, rank, queues)), given_at, read_at)


def _crossing(table: Table, source: int, reader: int) -> Iterator[tuple[Result, int]]:
    """Yield what a rank sends to another, in order, with the step that gives it."""
    for at, step in enumerate(table.lines[source]):
        for result in table.step_gives(source, step):
            if table.reader(result) == reader:
                yield result, at


def _posts(
    table: Table, rank: int, queues: dict[int, list[Result]]
) -> Iterator[tuple[Result, ...]]:
    """Yield for each step what must be posted before it that was not posted before."""
    posted: set[Result] = set()
    for step in table.lines[rank]:
        now: list[Result] = []
        for need in table.step_needs(rank, step):
            source = table.home(need.stage)
            while source != rank and need not in posted:
                now.append(queues[source].pop(0))
                posted.add(now[-1])
        yield tuple(now)
