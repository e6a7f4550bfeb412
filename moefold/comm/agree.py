"""Ranks that must not disagree: one decides and tells, or all show what they hold.

Small data that JSON can hold; numbers come through exactly. It crosses in host memory, over a
world's ``on_host``: the first rank may take long, and no device waits for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moefold.comm.collectives import (
    broadcast_,
    from_bytes,
    gather,
    gather_objects,
    receive,
    send,
    to_bytes,
)
from moefold.comm.group import Group


class Disagreement(ValueError):
    """Ranks hold different values of what must be one; the text names them."""


class FirstFailed(ValueError):
    """What the first rank did for all failed; the text is its error, which it shows itself."""


def told_by_first(value: Any, ranks: Group) -> Any:
    """Return the first rank's ``value``; what the others give is not looked at."""
    if ranks.size == 1:
        return value
    data = to_bytes(value if ranks.index == 0 else None)
    length = int(broadcast_(torch.tensor([len(data)]), ranks, 0))
    data = data if ranks.index == 0 else data.new_empty(length)
    return from_bytes(broadcast_(data, ranks, 0))


def tell_first(value: Any, ranks: Group) -> Iterator[Any]:
    """Return every rank's ``value`` on the first rank, in their order, and nothing on the others.

    The first rank holds one of them at a time.
    """
    if ranks.size == 1:
        return iter([value])
    data = to_bytes(value)
    lengths = gather(torch.tensor([len(data)]), ranks).flatten().tolist()
    if ranks.index:
        send(data, ranks.ranks[0], ranks).wait()
        return iter(())

    def heard() -> Iterator[Any]:
        yield value
        for rank, length in zip(ranks.ranks[1:], lengths[1:], strict=True):
            buffer = data.new_empty(length)
            receive(buffer, rank, ranks).wait()
            yield from_bytes(buffer)

    return heard()


def on_first(function: Callable[[], Any], ranks: Group) -> Any:
    """Call ``function`` on the first rank, the others waiting; return on all what it returned.

    Raises:
        Exception: on the first rank what the function raised.
        FirstFailed: on the others.
    """
    error: Exception | None = None
    answer: dict[str, Any] = {}
    if ranks.index == 0:
        try:
            answer = {"value": function()}
        except Exception as caught:
            error, answer = caught, {"error": f"{type(caught).__name__}: {caught}"}
    answer = told_by_first(answer, ranks)
    if error is not None:
        raise error
    if "error" in answer:
        raise FirstFailed(f"the first rank failed: {answer['error']}")
    return answer["value"]


def demand_same(facts: Mapping[str, Any], ranks: Group) -> None:
    """Check that all ranks hold the same facts.

    Raises:
        Disagreement: on every rank, naming each key that differs, its values, and who holds them.
    """
    shown = gather_objects(dict(facts), ranks)
    lines = []
    for key in dict.fromkeys(key for each in shown for key in each):
        holders: dict[str, list[int]] = {}
        for rank, each in zip(ranks.ranks, shown, strict=True):
            holders.setdefault(json.dumps(each.get(key)), []).append(rank)
        if len(holders) > 1:
            said = []
            for value, held in holders.items():
                more = f" and {len(held) - 4} more" if len(held) > 4 else ""
                said.append(f"{value} on rank {', '.join(map(str, held[:4]))}{more}")
            lines.append(f"{key}: {'; '.join(said)}")
    if lines:
        raise Disagreement("ranks were started with different values\n  " + "\n  ".join(lines))
