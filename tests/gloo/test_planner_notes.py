"""What recompute drops where tensor ranks share a layer: the planned bytes are those left alive."""

from functools import partial
from pathlib import Path

import torch

from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import from_ids
from moefold.layers.config import Selective
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.model.config import Block, Decoder, Stack
from moefold.model.init import start_value
from moefold.parallel.apply import build
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.case import recomputed
from moefold.planner.memory_kept import kept, kept_bytes
from moefold.spec.layer import Shape
from moefold.training.step import flow_of
from tests.cpu.alive import HIDDEN, LENGTH, SEQUENCES, Made
from tests.cpu.test_planner_kept import ALL, BLOCKS
from tests.gloo.forks import CPU, fork_ranks

TRIES = 4
"""The thread that sends may let go of a buffer late."""


def alive(block: Block, policy: Record | None, world: World) -> int:
    """Return the bytes that a layer's forward leaves alive on this rank."""
    decoder = Decoder(vocab=50, hidden=HIDDEN, stacks=(Stack(blocks=(block,)),))
    layout = Layout(sizes="tp2", recompute=policy)
    data = ShardedState(build(decoder, "fp32", layout, world, "meta"))
    data.fill(partial(start_value, decoder, 1))
    ids = torch.randint(0, 50, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    flow = flow_of(data.placed, from_ids(ids))
    layer = data.placed.model.get_submodule("layers.0")
    x_TD = torch.randn(flow.rows.rows, HIDDEN, requires_grad=True)
    layer(x_TD, flow)  # makes what passes share: angles, and copies of weights
    flow.decisions.clear()
    found: list[int] = []
    for _ in range(TRIES):
        made = Made()
        with made, flow.recompute.keeping():
            out = layer(x_TD, flow)
        given = {one.untyped_storage()._cdata for one in out}
        left = ((place, *of) for place, of in made.storages.items() if place not in given)
        found.append(sum(size for _, storage, size in left if not storage.expired()))
        flow.decisions.clear()
    return min(found)


def look(ranks: Group) -> None:
    """Compare, for each kind of layer and each kind of module, on one of two tensor ranks."""
    world = World.open(Folding(Sizes(tp=2), 2), CPU, 60.0)
    shape = Shape(HIDDEN, SEQUENCES * LENGTH // 2, tp=2, width=4)
    for name, block in BLOCKS.items():
        parts, whole = kept(block, shape), alive(block, None, world)
        for kind in ALL:
            policy = Selective(modules=(kind,))
            planned = kept_bytes(parts) - kept_bytes(parts, recomputed(policy))
            assert whole - alive(block, policy, world) == planned, (name, kind)
    world.close()


def test_a_kind_saves_under_tp_what_was_planned(tmp_path: Path) -> None:
    assert fork_ranks(look, 2, tmp_path) == [0, 0]
