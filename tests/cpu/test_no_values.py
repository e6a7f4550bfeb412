"""Passes of a whole step where tensors have no values: nothing in them depends on one.

A size that follows from a value, or a value that is read, cannot be captured; here it is an error.
One rank of a layout runs, over groups whose other ranks are not there.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.layers.config import Full, Selective
from moefold.layers.flow import Flow
from moefold.layers.loss import loss_and_gradients
from moefold.mesh.folding import Folding
from moefold.moe.config import Clones, Padded, Spread
from moefold.parallel.apply import ModelParts, build, flow_of
from moefold.parallel.config import Layout
from moefold.parallel.pipeline.executor import Executor, Factors
from tests.cpu.small import DEEP, MLA, Dense, decoder, moe, padded_rows

PADDED, SPREAD, CLONES = Padded(max_rows=64), Spread(max_rows=150), Clones(slots=2)
AGAIN = Selective(modules=("norms", "experts", "attention", "permute", "gather"))
DECODERS = {"small": decoder(), "latent": decoder(MLA, Dense(width=24), moe(router=DEEP))}
FIELDS = ("ids_T", "labels_T", "positions_T", "valid_T", "token_T", "row_T")


def without_values(found: Any, mode: FakeTensorMode) -> Any:
    """Return rows whose tensors have lost their values."""
    if found is None:
        return None
    parts = {name: getattr(found, name, None) for name in FIELDS}
    given = {name: mode.from_tensor(t) for name, t in parts.items() if isinstance(t, Tensor)}
    return dataclasses.replace(found, **given)


@contextmanager
def one_rank_of(layout: Layout, ranks: int) -> Iterator[World]:
    """Open the first rank's groups of a layout; what the others send is never there."""
    if ranks == 1:
        yield World.single()
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        world = World(Folding(layout.split, ranks), 0, torch.device("cpu"), 30)
        world._make_all()
        yield world
    finally:
        dist.destroy_process_group()


def lose_values(placed: ModelParts, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by such without values."""
    for module in placed.model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(mode.from_tensor(one.detach())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, mode.from_tensor(buffer))


def sizes_from_values(layout: Layout, ranks: int, model: str, rows: list[MicroBatch]) -> int:
    """Run all forwards and backwards of a step, and return how many sizes depended on values."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, static_shapes=True)
    with one_rank_of(layout, ranks) as world:
        placed = build(DECODERS[model], "bf16", layout, world)
        flows = [flow_of(placed, one) for one in rows]
        lose_values(placed, mode)
        with mode:

            def loss(x_TD: Tensor, flow: Flow, scale: Tensor) -> tuple[Tensor, Tensor]:
                head = placed.model.head_operand()
                return loss_and_gradients(x_TD, head, flow, scale=scale, chunk=16)

            for _, mixture in placed.model.mixtures():
                mixture.balance.start_step()
            bare = [
                dataclasses.replace(
                    flow,
                    rows=without_values(flow.rows, mode),
                    piece=without_values(flow.piece, mode),
                )
                for flow in flows
            ]
            factors = Factors(torch.ones(()), torch.ones(len(rows)))
            Executor(placed, bare, factors, loss).run()
            trained = [p for p in placed.model.parameters() if p.requires_grad]
            assert trained and all(p.grad is not None for p in trained)
    return int(shapes.unbacked_symint_counter)


LAYOUTS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (4, "small", {"sizes": "tp2 ep4", "dispatch": SPREAD, "clones": CLONES, "recompute": AGAIN}),
)
MORE: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (1, "small", {}),
    (1, "latent", {"recompute": Full()}),
    (1, "small", {"recompute": AGAIN}),
    *(
        (ranks, model, {"sizes": sizes, **way})
        for ranks, model, sizes in (
            (4, "small", "ep4"),
            (4, "latent", "tp2 ep2"),
            (4, "latent", "ep2 etp2"),
            (8, "small", "tp2 ep4 etp2"),
            (8, "small", "cp2 ep4"),
        )
        for way in (
            {"dispatch": PADDED, "recompute": AGAIN},
            {"dispatch": SPREAD, "recompute": Full()},
            {"dispatch": SPREAD, "clones": CLONES},
            {"dispatch": PADDED, "clones": CLONES, "recompute": Full()},
        )
    ),
)


def check(ranks: int, model: str, given: dict[str, Any]) -> None:
    """Hold a layout to sizes that no value decides."""
    rows = [padded_rows((24, 16), 8, seed=seed) for seed in range(2)]
    assert sizes_from_values(Layout(**given, zero=0), ranks, model, rows) == 0


@pytest.mark.parametrize(("ranks", "model", "given"), LAYOUTS)
def test_passes_run_without_values(ranks: int, model: str, given: dict[str, Any]) -> None:
    """Fixed room, clones, and what is made again: whatever is routed, shapes are the same."""
    check(ranks, model, given)


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "model", "given"), MORE)
def test_passes_of_any_layout_run_without_values(
    ranks: int, model: str, given: dict[str, Any]
) -> None:
    check(ranks, model, given)


def test_an_exact_dispatch_is_noticed() -> None:
    """It reads counts."""
    with pytest.raises(
        Exception, match=r"data-dependent|unbacked|Cannot call|tolist|_local_scalar"
    ):
        check(4, "small", {"sizes": "ep4"})
