"""A training step with experts on several ranks gives one rank's gradients, whatever sends rows."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, pack
from moefold.layers.placement import Box
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.training.step import gradients
from tests.cpu.small import decoder, relative
from tests.gloo.harness import run_ranks

KINDS = {
    "alltoall": "alltoall",
    "once": "alltoall_once",
    "allgather": "allgather",
    "two_level": {"kind": "two_level", "node": 2},
    "padded": {"kind": "padded", "max_rows": 64},
    "spread": {"kind": "spread", "max_rows": 128},
}
LAYOUTS = {
    2: (("ep2", *KINDS), ("tp2 ep2", "alltoall", "padded"), ("etp2", "alltoall", "once")),
    4: (
        ("tp2 ep4", "alltoall", "two_level", "spread"),
        ("ep2 etp2", "allgather", "padded"),
        ("pp2 ep2", "two_level"),
        ("tp2 etp4", "alltoall"),
    ),
}
WIDE = {
    4: (
        ("tp2 ep4", "once", "allgather", "padded"),
        ("ep2 etp2", "alltoall", "once", "spread"),
        ("ep4", *KINDS),
        ("pp2 ep2", "alltoall"),
        ("ep2", "alltoall"),
    ),
}
"""Those of the matrix."""
Found = dict[tuple[str, str], dict[str, float]]


def small() -> Decoder:
    """Return a decoder with values large enough that every part matters."""
    record = decoder()
    return record.model_copy(update={"init_std": 0.3, "init_out_scale": 1.0})


def batches(count: int) -> list[MicroBatch]:
    """Return micro-batches of uneven documents and padding rows."""
    generator = torch.Generator().manual_seed(0)
    draw = [
        [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (9, 5, 8)]
        for _ in range(count)
    ]
    return [pack(texts, pad_to=8, first_token=24 * j) for j, texts in enumerate(draw)]


class Step(NamedTuple):
    """Gradients of a step and their norm, and what of each whole one is here."""

    found: dict[str, torch.Tensor]
    boxes: dict[str, Box]


def step_of(sizes: str, dispatch: object, world: World) -> Step:
    """Run the backward of one step in a layout."""
    layout = Layout(sizes=sizes, dispatch=dispatch, zero=0)  # type: ignore[arg-type]
    parts = build_parts(small(), "fp64", layout, world)
    initialise(parts.model, parts.model.record, 1, parts.shards)
    dp, here = world.folding.dp, world.attention.dp
    mine = [batch for j, batch in enumerate(batches(4)) if j % dp == here]
    figures = gradients(ShardedState(parts), mine, 16)
    found = {name: p.grad for name, p in parts.model.named_parameters()}
    assert None not in found.values()
    norm = torch.tensor(figures.grad_norm, dtype=torch.float64)
    boxes = {name: shard.box for name, shard in parts.shards.items()}
    return Step({**found, "norm": norm}, {**boxes, "norm": ()})  # type: ignore[dict-item]


def compare(rank: int, ranks: int, layouts: dict[int, tuple[tuple[str, ...], ...]]) -> Found:
    """Return the relative error of each gradient, for all layouts of so many ranks."""
    whole = step_of("", "alltoall", World.single()).found
    errors: Found = {}
    for sizes, *kinds in layouts[ranks]:
        for kind in kinds:
            world = World.open(Folding(Sizes.parse(sizes), ranks), "cpu", 20)
            found, boxes = step_of(sizes, KINDS[kind], world)
            errors[sizes, kind] = {
                name: relative(grad, whole[name][tuple(slice(*ends) for ends in boxes[name])])
                for name, grad in found.items()
            }
    return errors


@cache
def answers(ranks: int, wide: bool) -> list[Found]:
    return run_ranks(compare, ranks, ranks, WIDE if wide else LAYOUTS, time_out_s=60)


CASES = [
    pytest.param(n, sizes, kind, wide, marks=[pytest.mark.matrix] if wide else [])
    for wide, layouts in enumerate((LAYOUTS, WIDE))
    for n, all_ in layouts.items()
    for sizes, *kinds in all_
    for kind in kinds
]


@pytest.mark.parametrize(("ranks", "sizes", "kind", "wide"), CASES)
def test_gradients_are_those_of_one_rank(ranks: int, sizes: str, kind: str, wide: bool) -> None:
    """Each token counts once in an expert's gradient, over ep, etp, tp, pp and data ranks."""
    for rank, found in enumerate(answers(ranks, wide)):
        broken = {n: e for n, e in found[sizes, kind].items() if not e <= 1e-10}
        assert not broken, (rank, broken)
