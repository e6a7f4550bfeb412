"""One rank of a layout in one process, on fake process groups: for runs whose values are unused."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.world import World
from moefold.mesh.folding import Folding


@contextmanager
def fake_world(folding: Folding, rank: int) -> Iterator[World]:
    """Create a rank's groups on a fake backend, whose collectives return arbitrary values."""
    if folding.world == 1:
        yield World.single()
        return
    dist.init_process_group("fake", rank=rank, world_size=folding.world, store=FakeStore())
    try:
        world = World(folding, rank, torch.device("cpu"), 30.0)
        world._create_groups()
        yield world
    finally:
        dist.destroy_process_group()
