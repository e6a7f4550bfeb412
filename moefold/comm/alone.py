"""One rank of a layout in one process, with fake process groups, for passes without values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.world import World
from moefold.mesh.folding import Folding


@contextmanager
def lone_rank(folding: Folding, rank: int) -> Iterator[World]:
    """Open a rank's groups on a fake backend: collectives return at once with arbitrary values."""
    if folding.world == 1:
        yield World.single()
        return
    dist.init_process_group("fake", rank=rank, world_size=folding.world, store=FakeStore())
    try:
        world = World(folding, rank, torch.device("cpu"), 30.0)
        world._make_all()
        yield world
    finally:
        dist.destroy_process_group()
