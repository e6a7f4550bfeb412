"""Layouts write the same text as one rank, keys and values kept or not."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.model.generate import generate
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.score import next_logits
from moefold.proof.rank_run import initialise_model
from moefold.proof.subjects import SUBJECTS
from moefold.training.routing_generation import generate_texts

PROMPTS = ([3, 1, 4, 1, 5], [2], [7, 7])


def write(
    info: RankInfo | None, name: str, sizes: str, zero: int, keep: bool, routing: str
) -> list[list[int]]:
    """Write eight tokens after each prompt, in fp64; with a cache, record the routing."""
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
    if keep:
        return generate_texts(parts, PROMPTS, 3, routing, tokens=8, temperature=0)
    return generate(partial(next_logits, parts), PROMPTS, 8, temperature=0)


def recorded(folder: Path) -> dict[tuple[str, int], list[int]]:
    """Return the id and the experts of each token in the files of all ranks, by layer and token."""
    found = {}
    for path in sorted(folder.glob("step-00000003/*.safetensors")):
        file = load_file(path)
        ids, tokens = file.pop("id").tolist(), file.pop("token").tolist()
        for layer, chosen in file.items():
            for token, own, experts in zip(tokens, ids, chosen.tolist(), strict=True):
                assert found.setdefault((layer, token), [own, *experts]) == [own, *experts]
    return found


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
def test_a_layout_writes_as_one_rank(name: str, sizes: str, zero: int, tmp_path: Path) -> None:
    """It records the experts of as many tokens as the texts have, and the same ones."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone = write(None, name, "", 0, False, "")
    assert write(None, name, "", 0, True, str(one)) == alone
    assert launch(write, 2, name, sizes, zero, True, str(two), time_out_s=60) == alone
    experts = recorded(one)
    tokens = sum(len(prompt) + 8 for prompt in PROMPTS)
    assert {token for _, token in experts} == set(range(tokens))
    assert recorded(two) == experts
