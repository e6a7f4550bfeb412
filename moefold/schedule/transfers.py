"""Sends and receives, derived from a table: nobody writes them by hand."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moefold.schedule.table import Result, Step, Table, actions_of


class Transfer(NamedTuple):
    """One tensor that crosses between two ranks, seen from one of them."""

    way: Literal["send", "receive"]
    result: Result
    peer: int


Channel = tuple[int, int, str]
"""Sending rank, receiving rank, and which of outputs and gradients it carries."""


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
        for need in table.needs(rank, action):
            source = table.home(need.stage)
            if source != rank:
                yield Transfer("receive", need, source)
    yield step
    for action in actions:
        given = table.gives(rank, action)
        reader = None if given is None else table.reader(given)
        if given is not None and reader is not None and reader != rank:
            yield Transfer("send", given, reader)


def channels(table: Table, way: Literal["send", "receive"]) -> dict[Channel, list[Result]]:
    """Return what crosses each channel, in the order in which one end of it acts."""
    crossing: dict[Channel, list[Result]] = {}
    for rank, line in enumerate(with_transfers(table)):
        for part in line:
            if isinstance(part, Transfer) and part.way == way:
                ends = (rank, part.peer) if way == "send" else (part.peer, rank)
                crossing.setdefault((*ends, part.result.what), []).append(part.result)
    return crossing
