"""What recompute drops where tensor ranks share a layer: the planned bytes are those left alive."""

import time
from pathlib import Path

import torch

from moefold.comm.collectives import sum_
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import from_ids
from moefold.layers.config import Selective
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.model.config import Block, Decoder, Stack
from moefold.model.init import initial_values
from moefold.parallel.apply import build_flow, build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.memory_saved import saved_bytes, saved_tensors
from moefold.spec.layer import Shape, recomputed_modules
from tests.cpu.alive import HIDDEN, LENGTH, SEQUENCES, StorageRecorder
from tests.cpu.test_planner_kept import ALL, BLOCKS
from tests.gloo.forks import CPU, fork_ranks

PATIENCE_S, SETTLED_S = 1.0, 0.1
"""The thread that sends may let go of a buffer late."""


def alive(block: Block, policy: Record | None, world: World, planned: int | None = None) -> int:
    """Return the bytes that a layer's forward leaves alive on this rank, once they are planned.

    Where they never are, those that are there after a while.
    """
    decoder = Decoder(vocab=50, hidden=HIDDEN, stacks=(Stack(blocks=(block,)),))
    layout = Layout(sizes="tp2", recompute=policy)
    data = ShardedState(build_parts(decoder, "fp32", layout, world, "meta"))
    data.fill(initial_values(decoder, 1))
    ids = torch.randint(0, 50, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    flow = build_flow(data.parts, from_ids(ids))
    layer = data.parts.model.get_submodule("layers.0")
    x_TD = torch.randn(flow.rows.rows, HIDDEN, requires_grad=True)
    layer(x_TD, flow)  # makes what passes share: angles, and copies of weights
    flow.decisions.clear()
    made = StorageRecorder()
    with made, flow.saved_tensors.layer_hooks():
        out = layer(x_TD, flow)
    flow.decisions.clear()
    for _ in range(4):  # a thread lets go of the rows of its last exchange when it has another
        sum_(torch.zeros(1), world.group("tp"))
    given = {one.untyped_storage()._cdata for one in out}
    until = time.monotonic() + (PATIENCE_S if planned else SETTLED_S)
    while (found := made.live_bytes(given)) != planned and time.monotonic() < until:
        time.sleep(0.01)
    return found


def look(ranks: Group) -> None:
    """Compare on one of two tensor ranks, for each kind of layer; kinds of modules take turns."""
    world = World.open(Folding(Sizes(tp=2), 2), CPU, 60.0)
    shape = Shape(HIDDEN, SEQUENCES * LENGTH // 2, tp=2, width=4)
    for turn, (name, block) in enumerate(BLOCKS.items()):
        parts, whole = saved_tensors(block, shape), alive(block, None, world)
        for kinds in (
            *((kind,) for kind in ALL[turn % 8 :: 8]),
            (("norms", "mla_up")[turn % 2], "gather"),
            ALL,
        ):
            policy = Selective(modules=kinds)
            planned = whole - saved_bytes(parts) + saved_bytes(parts, recomputed_modules(policy))
            assert alive(block, policy, world, planned) == planned, (name, kinds)
    world.close()


def test_a_kind_saves_under_tp_what_was_planned(tmp_path: Path) -> None:
    assert fork_ranks(look, 2, tmp_path) == [0, 0]
