"""Sends and receives, derived from a table: nobody writes them by hand."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moefold.schedule.table import ActionResult, Step, Table, actions_of


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


def channels(table: Table) -> tuple[Crossing, Crossing]:
    """Return what is sent and what is received on each channel, in the order of that end."""
    sent: Crossing = {}
    received: Crossing = {}
    for rank, line in enumerate(with_transfers(table)):
        for part in line:
            if isinstance(part, Transfer) and part.way == "send":
                sent.setdefault((rank, part.peer, part.result.what), []).append(part.result)
            elif isinstance(part, Transfer):
                received.setdefault((part.peer, rank, part.result.what), []).append(part.result)
    return sent, received
