"""Ranks that must not disagree: one decides and tells, or all show what they hold.

Small data that JSON can hold; numbers come through exactly. It crosses in host memory, over a
world's ``on_host``: the first rank may take long, and no device waits for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from moefold.comm.collectives import broadcast_, gather, gather_objects, receive, send
from moefold.comm.group import Group


class Disagreement(ValueError):
    """Ranks hold different values of what must be one; the text names them."""


class FirstFailed(ValueError):
    """What the first rank did for all failed; the text is its error, which it shows itself."""


def told_by_first(value: Any, ranks: Group) -> Any:
    """Return the first rank's ``value``; what the others give is not looked at."""
    if ranks.size == 1:
        return value
    data = json.dumps(value).encode() if ranks.index == 0 else b""
    length = broadcast_(torch.tensor([len(data)]), ranks, 0)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if ranks.index == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return json.loads(bytes(broadcast_(buffer, ranks, 0).numpy()))


def tell_first(value: Any, ranks: Group) -> Iterator[Any]:
    """Return every rank's ``value`` on the first rank, in their order, and nothing on the others.

    The first rank holds one of them at a time.
    """
    if ranks.size == 1:
        return iter([value])
    data = json.dumps(value).encode()
    lengths = gather(torch.tensor([len(data)]), ranks).flatten().tolist()
    if ranks.index == 0:
        return chain([value], _heard(lengths, ranks))
    said = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    send(said, ranks.ranks[0], ranks).wait()
    return iter(())


def _heard(lengths: list[int], ranks: Group) -> Iterator[Any]:
    for rank, length in zip(ranks.ranks[1:], lengths[1:], strict=True):
        buffer = torch.empty(length, dtype=torch.uint8)
        receive(buffer, rank, ranks).wait()
        yield json.loads(bytes(buffer.numpy()))


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
            said = "; ".join(f"{value} on rank {_some(held)}" for value, held in holders.items())
            lines.append(f"{key}: {said}")
    if lines:
        raise Disagreement("ranks were started with different values\n  " + "\n  ".join(lines))


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"
