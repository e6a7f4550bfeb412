"""Agreement between ranks: broadcast from the first rank, gather to it, or compare values.

For small data that JSON can represent; numbers stay exact. Data is in host memory and sent over
``World.on_host``, so that the first rank may take long and no device waits for it.
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
    """Ranks have different values where they must be equal; the text lists them."""


class FirstRankFailed(ValueError):
    """Work that the first rank does for all failed; the text is its error, which it raises."""


def broadcast_from_first(value: Any, ranks: Group) -> Any:
    """Broadcast the first rank's ``value``; the other ranks' argument is ignored."""
    if ranks.size == 1:
        return value
    data = to_bytes(value if ranks.index == 0 else None)
    length = int(broadcast_(torch.tensor([len(data)]), ranks, 0))
    data = data if ranks.index == 0 else data.new_empty(length)
    return from_bytes(broadcast_(data, ranks, 0))


def gather_to_first(value: Any, ranks: Group) -> Iterator[Any]:
    """Return an iterator over all ranks' values, in rank order; empty except on the first rank.

    The first rank receives one value at a time, and must exhaust the iterator.
    """
    if ranks.size == 1:
        return iter([value])
    data = to_bytes(value)
    lengths = gather(torch.tensor([len(data)]), ranks).flatten().tolist()
    if ranks.index:
        send(data, ranks.ranks[0], ranks).wait()
        return iter(())

    def receive_values() -> Iterator[Any]:
        yield value
        for rank, length in zip(ranks.ranks[1:], lengths[1:], strict=True):
            buffer = data.new_empty(length)
            receive(buffer, rank, ranks).wait()
            yield from_bytes(buffer)

    return receive_values()


def run_on_first(function: Callable[[], Any], ranks: Group) -> Any:
    """Call ``function`` on the first rank, and return its result on all ranks.

    Raises:
        Exception: on the first rank, whatever the function raised.
        FirstRankFailed: on the other ranks, if it raised.
    """
    error: Exception | None = None
    answer: dict[str, Any] = {}
    if ranks.index == 0:
        try:
            answer = {"value": function()}
        except Exception as caught:
            error = caught
            answer = {"error": f"{type(caught).__name__}: {caught}"}
    answer = broadcast_from_first(answer, ranks)
    if error is not None:
        raise error
    if "error" in answer:
        raise FirstRankFailed(f"the first rank failed: {answer['error']}")
    return answer["value"]


def require_same(facts: Mapping[str, Any], ranks: Group) -> None:
    """Raise unless all ranks have the same ``facts``.

    Raises:
        Disagreement: on every rank, with each key that differs, its values and their ranks.
    """
    facts_by_rank = gather_objects(dict(facts), ranks)
    lines = []
    for key in dict.fromkeys(key for each in facts_by_rank for key in each):
        holders: dict[str, list[int]] = {}
        for rank, each in zip(ranks.ranks, facts_by_rank, strict=True):
            holders.setdefault(json.dumps(each.get(key)), []).append(rank)
        if len(holders) > 1:
            texts = []
            for value, held in holders.items():
                shown = ", ".join(map(str, held[:4]))
                more = f" and {len(held) - 4} more" if len(held) > 4 else ""
                texts.append(f"{value} on rank {shown}{more}")
            lines.append(f"{key}: {'; '.join(texts)}")
    if lines:
        raise Disagreement("ranks were started with different values\n  " + "\n  ".join(lines))
