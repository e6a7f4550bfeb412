"""Layouts write the same text as one rank, keys and values kept or not."""

from functools import partial

import pytest
import torch

from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.model.generate import generate
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.score import incremental_logits, next_logits
from moefold.proof.rank_run import initialise_model
from moefold.proof.subjects import SUBJECTS

PROMPTS = ([3, 1, 4, 1, 5], [2], [7, 7])


def write(info: RankInfo | None, name: str, sizes: str, zero: int, keep: bool) -> list[list[int]]:
    """Write eight tokens after each prompt, in fp64."""
    subject, layout = SUBJECTS[name], Layout(sizes=sizes, zero=zero)
    world = (
        World.single()
        if info is None
        else World.open(Folding(layout.split, info.world_size, layout.order), "cpu", 60)
    )
    torch.manual_seed(0)
    parts = build_parts(subject.decoder, "fp64", layout, world)
    initialise_model(parts.model, subject, parts.shards)
    parts = ShardedState(parts).parts
    follows = incremental_logits(parts) if keep else partial(next_logits, parts)
    return generate(follows, PROMPTS, 8, temperature=0)


@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [
        ("gqa", "tp2", 0),
        ("mla", "pp2", 0),
        ("gqa", "ep2", 3),
        ("gqa", "cp2", 0),
        ("mla", "tp2 ep2", 0),
        ("odd vocabulary", "tp2", 3),
        ("odd vocabulary tied", "tp2", 0),
        *(
            pytest.param(name, "tp2", 0, marks=pytest.mark.matrix)
            for name in ("delta", "channels", "convolved", "chunked", "gated latents")
        ),
    ],
)
def test_a_layout_writes_as_one_rank(name: str, sizes: str, zero: int) -> None:
    alone = write(None, name, "", 0, False)
    assert write(None, name, "", 0, True) == alone
    assert launch(write, 2, name, sizes, zero, True, time_out_s=60) == alone
