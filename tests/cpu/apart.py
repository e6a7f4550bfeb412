"""One rank of a layout without the others, on ``meta``: every branch for accelerators is taken.

Collectives give shapes alone, and what is read on the host is made up, so that no value is needed
and a tensor that was left in host memory shows by its device.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from moefold.comm import collectives
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.data.batch import MicroBatch, assemble
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.parallel.apply import place_model
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState

META = torch.device("meta")
ROWS = 16
"""Rows of a micro-batch, and the number that every count says."""


def data_of(
    record: Decoder, layout: Layout, ranks: int, rank: int = 0, precision: str = "bf16"
) -> ShardedState:
    """Return a rank's share of a model; call it inside :func:`apart`."""
    world = World(Folding(layout.split, ranks), rank, META, 1.0)
    world._make_all()
    model = DecoderModel(record, precision, layout.dispatch, layout.experts, "meta")  # type: ignore[arg-type]
    return ShardedState(place_model(model, layout, world))


def micro_batch(rows: int = ROWS) -> MicroBatch:
    """Return rows of one document, on the host."""
    zeros = np.zeros(rows, np.int64)
    return assemble(zeros, zeros, [rows])


@contextmanager
def apart() -> Iterator[None]:
    """While open, groups have nobody else in them and nothing has a value."""
    tolist = Tensor.tolist

    def told(counts: Tensor) -> Any:
        if not counts.is_meta:
            return tolist(counts)
        return [ROWS] * counts.numel() if counts.numel() > 1 else [0]

    changes = {
        (World, "_new"): _group,
        (Tensor, "tolist"): told,
        (Tensor, "is_set_to"): lambda one, other: True,
        (collectives, "exchange"): _exchange,
        (collectives, "_into"): _into,
        (collectives, "gather_uneven"): _gather_uneven,
        (collectives, "reduce_"): lambda x, group, label=None, op=None: x,
    }
    with ExitStack() as stack:
        for (owner, name), change in changes.items():
            stack.enter_context(mock.patch.object(owner, name, change))
        yield


def _group(world: World, name: str, ranks: tuple[int, ...]) -> Group:
    return Group(world._prefix + name, ranks, ranks.index(world.rank), None, world.recorder)


def _exchange(
    x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], *said: Any, **named: Any
) -> Tensor:
    return x_R if group.size == 1 else x_R.new_empty((sum(receive), *x_R.shape[1:]))


def _gather_uneven(x: Tensor, group: Group, counts: Sequence[int], label: Any = None) -> Tensor:
    return x if group.size == 1 else x.new_empty((sum(counts), *x.shape[1:]))


def _into(
    op: str, out: Tensor, x: Tensor, group: Group, asynchronous: bool, label: Any
) -> collectives.Pending:
    if group.size == 1:
        out.copy_(x.reshape(out.shape))
    return collectives.Pending()
