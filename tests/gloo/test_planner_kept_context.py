"""Planned bytes that a layer keeps on context ranks, against what stays alive there."""

import time
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from moefold.comm.collectives import sum_
from moefold.comm.world import World
from moefold.data.batch import from_ids
from moefold.layers.config import Context
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.mesh.folding import Folding
from moefold.model.config import Block, Decoder, Stack
from moefold.model.init import initialise
from moefold.parallel import apply
from moefold.parallel.apply import build_flow
from moefold.parallel.config import Layout
from moefold.planner.memory_saved import saved_bytes, saved_tensors
from moefold.spec.layer import Shape, recomputed_modules
from tests.cpu.alive import StorageRecorder, there
from tests.gloo.harness import run_ranks

HIDDEN, SEQUENCES, LENGTH = 64, 2, 32
BLOCKS = {
    "heads": Block(attention=Gqa(heads=8, kv_heads=4, head_dim=16), ffn=Dense(width=48)),
    "narrow values": Block(
        attention=Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        ffn=Dense(width=48),
    ),
    "wide values": Block(
        attention=Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=24),
        ffn=Dense(width=48),
    ),
}
DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=24)
LINEAR = {"delta net": Block(attention=DELTA, ffn=Dense(width=48))}
POLICIES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kind": "full"},
    {"kind": "selective", "modules": ["attention"]},
    {"kind": "selective", "modules": ["mla_up"]},
    {"kind": "selective", "modules": ["attention", "mla_up"]},
)


PATIENCE_S = 1.0


class Asked(NamedTuple):
    """A layer, and how it is run."""

    context: dict[str, Any]
    block: str
    precision: Any
    policy: dict[str, Any] | None


def stays(rank: int, ranks: int, asked: Sequence[Asked]) -> list[int]:
    """Return the bytes that each layer leaves alive on a rank."""
    world = World.open(Folding(Layout(sizes=f"cp{ranks}").split, ranks), "cpu", 30)
    return [alive(world, one, ranks) for one in asked]


def alive(world: World, asked: Asked, ranks: int) -> int:
    """Run a layer forward; return the bytes of its input and of what it keeps."""
    decoder = Decoder(
        vocab=50, hidden=HIDDEN, stacks=(Stack(blocks=((BLOCKS | LINEAR)[asked.block],)),)
    )
    layout = {"sizes": f"cp{ranks}", "context": asked.context, "recompute": asked.policy}
    parts = apply.build_parts(decoder, asked.precision, Layout.model_validate(layout), world)
    initialise(parts.model, decoder, 1, parts.shards)
    layer: nn.Module = parts.model.get_submodule("layers.0")
    flow = build_flow(parts, from_ids(torch.randint(0, 50, (SEQUENCES, LENGTH))))
    x_TD = torch.randn(
        flow.rows.rows, HIDDEN, dtype=flow.precision_policy.dtype, requires_grad=True
    )
    layer(x_TD, flow)
    old = there(layer, flow) | {x_TD.untyped_storage()._cdata}
    with StorageRecorder() as made, flow.saved_tensors.layer_hooks():
        out = flow.saved_tensors.run("block", lambda x: layer(x, flow), x_TD)
    old |= {one.untyped_storage()._cdata for one in out}
    # Threads of the back end hold the rows of their last exchange until the next one, and let go
    # of them when they come to it.
    for _ in range(4):
        sum_(torch.zeros(1), world.group("cp"))
    given, until = x_TD.untyped_storage().nbytes(), time.monotonic() + PATIENCE_S
    while (found := given + made.live_bytes(old)) != planned(
        asked, ranks
    ) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def planned(asked: Asked, ranks: int) -> int:
    context = Layout.model_validate({"context": asked.context}).context
    rows, width = SEQUENCES * LENGTH // ranks, 4 if asked.precision == "fp32" else 2
    assert isinstance(context, Context)
    sharing = context.sharing_heads(ranks)
    moves = {"gathers": context.gathers, "ranks_sharing_heads": sharing}
    shape = Shape(HIDDEN, rows, width=width, cp=ranks, **moves)
    layout = Layout.model_validate({"recompute": asked.policy})
    saved = saved_tensors((BLOCKS | LINEAR)[asked.block], shape)
    return saved_bytes(saved, recomputed_modules(layout.recompute))


@pytest.mark.parametrize(
    ("ranks", "contexts"),
    [
        (2, [{"kind": kind} for kind in ("ring", "all_gather", "all_to_all")]),
        (4, [{"kind": "mixed", "heads": 2}, {"kind": "all_gather"}]),
    ],
    ids=["2 ranks", "4 ranks"],
)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_what_stays_alive_is_planned(
    ranks: int, contexts: list[dict[str, Any]], every: bool
) -> None:
    """Of all pairs; with the tests a seventh, in which each context, layer and policy comes."""
    asked = [Asked(*one) for one in product(contexts, BLOCKS, ("bf16", "fp32"), POLICIES)]
    asked = asked[:: 1 if every else 7]
    asked += [Asked(contexts[0], name, "bf16", None) for name in LINEAR]
    by_rank = run_ranks(stays, ranks, ranks, asked, time_out_s=90)
    wanted = [planned(one, ranks) for one in asked]
    wrong = {
        str(one): (want, got)
        for one, want, *got in zip(asked, wanted, *by_rank, strict=True)
        if any(each != want for each in got)
    }
    assert not wrong, wrong
