"""A step of one rank without values, on ``meta``: what it launches, exchanges and waits for.

The rank runs without the others (:mod:`moefold.comm.lone`). On ``meta`` every branch for
accelerators is taken, what is read on the host is made up, so that no value is needed, and a tensor
that was left in host memory shows by its device.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import numpy as np
import torch
from torch import Tensor

from moefold.comm import collectives
from moefold.comm.group import Group
from moefold.comm.lone import join_alone, leave
from moefold.data.batch import MicroBatch, assemble
from moefold.layers.config import Precision
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.moe import clone_weights
from moefold.parallel import limits
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState

META = torch.device("meta")
ROWS = 16
"""Rows of a micro-batch, and the number that every count says."""
Numbers = Callable[[int], list[Any]]
"""What so many numbers of a tensor are when the host reads them."""
Note = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]
"""Told of each collective: its name, what it reads and what it writes."""


def data_of(
    record: Decoder,
    layout: Layout,
    ranks: int,
    rank: int = 0,
    precision: Precision = "bf16",
    device: torch.device = META,
) -> ShardedState:
    """Return a rank's share of a model, without values; call it inside :func:`apart`."""
    world = join_alone(Folding(layout.split, ranks), rank, device)
    return ShardedState(build_parts(record, precision, layout, world, "meta"))


def micro_batch(rows: int = ROWS, documents: int = 1) -> MicroBatch:
    """Return rows of documents of one length, on the host."""
    zeros = np.zeros(rows, np.int64)
    return assemble(zeros, zeros, [rows // documents] * documents)


def all_alike(count: int) -> list[Any]:
    """Say ``ROWS`` for each of several counts, and that a flag on its own is not set."""
    return [ROWS] * count if count > 1 else [0]


@contextmanager
def apart(
    numbers: Numbers = all_alike, note: Note | None = None, waits: Counter[str] | None = None
) -> Iterator[None]:
    """While open, a rank runs without the others, with or without values.

    Args:
        numbers: what the host reads from ``meta``.
        note: told of each collective.
        waits: counts how often the host reads from the device or makes a tensor of numbers there,
            both of which wait, by the function that does.
    """
    tolist, tensor, is_set_to = Tensor.tolist, torch.tensor, Tensor.is_set_to
    waits = Counter() if waits is None else waits

    def told(values: Tensor) -> Any:
        if not values.is_meta:
            return tolist(values)
        waits[waiting_function()] += 1
        return numbers(values.numel())

    def made(*given: Any, **named: Any) -> Tensor:
        result = tensor(*given, **named)
        if result.is_meta:  # no copy is dispatched that would show it
            waits[waiting_function()] += 1
        return result

    changes = {
        (torch, "tensor"): made,
        (limits, "missing_room"): lambda *_: None,  # what is read there says that all ranks lack it
        (Tensor, "tolist"): told,
        (Tensor, "is_set_to"): lambda one, other: one.is_meta or is_set_to(one, other),
        (collectives, "exchange"): _noted(_exchange, note),
        (clone_weights, "exchange"): _noted(_exchange, note),
        (collectives, "_fill"): _noted(collectives._fill, note),
        (collectives, "gather_uneven"): _noted(_gather_uneven, note),
        (collectives, "all_reduce_"): _noted(collectives.all_reduce_, note),
    }
    with ExitStack() as stack:
        stack.callback(leave)
        for (owner, name), change in changes.items():
            stack.enter_context(mock.patch.object(owner, name, change))
        yield


def waiting_function() -> str:
    """Name the package's function that waits for the device, by its file and name."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/moefold/" not in frame.f_code.co_filename:
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition("/moefold/")[2]
    return f"{file}:{frame.f_code.co_name}"


def _noted(run: Callable[..., Any], note: Note | None) -> Callable[..., Any]:
    """Tell of what a collective reads and writes, where it has anybody to talk to."""

    def noted(*given: Any, **named: Any) -> Any:
        result = run(*given, **named)
        everything = [*given, *named.values()]
        (group,) = [each for each in everything if isinstance(each, Group)]
        tensors = [each for each in given if isinstance(each, Tensor)]
        if note is not None and group.size > 1:
            written = [result] if isinstance(result, Tensor) else tensors[:1]
            note(run.__name__.strip("_"), tensors[-1:], written)
        return result

    return noted


_real_exchange = collectives.exchange
_real_gather_uneven = collectives.gather_uneven


def _exchange(
    x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], *said: Any, **named: Any
) -> Tensor:
    """Exchange rows; without values their numbers are made up, and need not agree."""
    if x_R.is_meta and group.size > 1:
        return x_R.new_empty((sum(receive), *x_R.shape[1:]))
    return _real_exchange(x_R, group, send, receive, *said, **named)


def _gather_uneven(x: Tensor, group: Group, counts: Sequence[int], label: Any = None) -> Tensor:
    """Gather rows; without values their numbers are made up, and need not agree."""
    if x.is_meta and group.size > 1:
        return x.new_empty((sum(counts), *x.shape[1:]))
    return _real_gather_uneven(x, group, counts, label)
