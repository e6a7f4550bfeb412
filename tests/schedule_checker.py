"""What must hold of every table, whoever wrote it; its sends and receives, written out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from moefold.schedule.simulate import Deadlock, Timeline, topological_steps
from moefold.schedule.table import Action, ActionResult, Kind, Pair, Step, Table, actions_of

_EARLIER: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}


def problems(table: Table, limit: Sequence[int] | None = None) -> list[str]:
    """Return everything that is wrong with a table, in words; nothing where it is right.

    Args:
        limit: most chunks that each rank may keep in flight.
    """
    found = [text for rank in range(table.ranks) for text in _line(table, rank)]
    found += _deadlock(table) + _channels(table)
    for rank, (peak, most) in enumerate(zip(peak_in_flight(table), limit or (), strict=False)):
        if peak > most:
            found.append(f"rank {rank} keeps {peak} chunks in flight, at most {most} are allowed")
    return found


def bubble(timeline: Timeline) -> tuple[float, ...]:
    """Return the time each rank is in no step."""
    return tuple(timeline.makespan - busy for busy in timeline.busy)


def gaps(timeline: Timeline) -> tuple[float, ...]:
    """Return the time each rank is in no step between its first start and its last end."""
    lines = zip(timeline.spans, timeline.busy, strict=True)
    return tuple(line[-1].end - line[0].start - busy for line, busy in lines)


def peak_in_flight(table: Table) -> tuple[int, ...]:
    """Return the most chunks whose activations each rank keeps at once.

    A chunk's are kept from its F until its B, or until its W where I and W stand apart. In a pair
    both are there together.
    """
    return tuple(max(_in_flight(table, rank), default=0) for rank in range(table.ranks))


def _in_flight(table: Table, rank: int) -> Iterator[int]:
    kept = 0
    for action in table.actions(rank):
        kept += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        yield kept


def _line(table: Table, rank: int) -> Iterator[str]:
    """Yield what is wrong within one rank's line."""
    where = f"rank {rank}: "
    seen: set[Action] = set()
    last: dict[tuple[str, int], Action] = {}
    for step in table.lines[rank]:
        for text in _step(step, seen):
            yield where + text
        for action in actions_of(step):
            way = {"I": "B"}.get(action.kind, action.kind), action.chunk
            before = last.get(way, action)
            if before.micro > action.micro:
                yield f"{where}{action} comes after {before}: micro-batches ascend in a chunk"
            last[way] = action
            seen.add(action)
    yield from (where + text for text in _counts(table, rank))


def _step(step: Step, seen: set[Action]) -> Iterator[str]:
    if isinstance(step, Pair) and step.forward.kind + step.backward.kind not in ("FB", "FI"):
        yield f"{step} is no forward beside a backward"
    for action in actions_of(step):
        earlier = _EARLIER.get(action.kind)
        if earlier and action._replace(kind=earlier) not in seen:
            yield f"{action} is not after {action._replace(kind=earlier)}"


def _counts(table: Table, rank: int) -> Iterator[str]:
    """Yield what is missing, stands twice or does not belong: F once, and B once or I and W."""
    counts = Counter(table.actions(rank))
    wanted = {(c, i) for c in range(table.chunks) for i in range(table.micro_batches)}
    for chunk, micro in sorted({(a.chunk, a.micro) for a in counts} | wanted):
        f, b, i, w = (counts[Action(kind, chunk, micro)] for kind in get_args(Kind))
        if (chunk, micro) not in wanted:
            yield f"chunk {chunk}, micro-batch {micro} does not exist"
        elif f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
            times = f"F {f}, B {b}, I {i}, W {w} times"
            yield f"chunk {chunk}, micro-batch {micro} has {times}; F and B, or F, I and W, once"


def _deadlock(table: Table) -> list[str]:
    try:
        for _ in topological_steps(table):
            pass
    except Deadlock as error:
        return [f"deadlock: {error}"]
    return []


def _channels(table: Table) -> list[str]:
    """Compare both ends of each channel: what is sent is received, in the same order."""
    sent, received = channels(table)
    return [
        f"{what}s from rank {one} to rank {other} are received in another order than they are sent"
        for one, other, what in sorted({*sent, *received})
        if sent.get((one, other, what)) != received.get((one, other, what))
    ]


# Transfers, derived from a table


class Transfer(NamedTuple):
    """One tensor that crosses between two ranks, seen from one of them."""

    way: Literal["send", "receive"]
    result: ActionResult
    peer: int


Channel = tuple[int, int, str]
"""Sending rank, receiving rank, and which of outputs and gradients it carries."""
Crossing = dict[Channel, list[ActionResult]]


def with_transfers(table: Table) -> tuple[tuple[Step | Transfer, ...], ...]:
    """Return each rank's steps with receives just before and sends just after what they serve.

    Chunks on the same rank hand over directly, without a transfer.
    """
    return tuple(
        tuple(part for step in line for part in _dressed(table, rank, step))
        for rank, line in enumerate(table.lines)
    )


def _dressed(table: Table, rank: int, step: Step) -> Iterator[Step | Transfer]:
    actions = actions_of(step)
    for action in actions:
        for need in table.action_inputs(rank, action):
            source = table.rank_of(need.stage)
            if source != rank:
                yield Transfer("receive", need, source)
    yield step
    for action in actions:
        given = table.action_result(rank, action)
        reader = None if given is None else table.reader_rank(given)
        if given is not None and reader is not None and reader != rank:
            yield Transfer("send", given, reader)


def channels(table: Table) -> tuple[Crossing, Crossing]:
    """Return what is sent and what is received on each channel, in the order of that end."""
    sent: Crossing = {}
    received: Crossing = {}
    for rank, line in enumerate(with_transfers(table)):
        for part in line:
            if isinstance(part, Transfer) and part.way == "send":
                sent.setdefault((rank, part.peer, part.result.kind), []).append(part.result)
            elif isinstance(part, Transfer):
                received.setdefault((part.peer, rank, part.result.kind), []).append(part.result)
    return sent, received
