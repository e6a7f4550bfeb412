"""Hugging Face in, three steps in a layout, out: as transformers itself after the same steps."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moefold.api import export
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import save
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.convert.plan import contract
from moefold.convert.source import ConvertError
from moefold.convert.stream import TensorBatch, stream_weights
from moefold.data.batch import from_ids
from moefold.mesh.folding import Folding
from moefold.optim.config import AdamW
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.training.model_checkpoint import StoredModel, describe_model
from moefold.training.state import assigned_state
from moefold.training.step import gradients
from tests.cpu.families import reference
from tests.family_draws import draw
from tests.gloo.forks import fork_ranks

STEPS = 3
MICRO_BATCHES = 4
ADAMW = AdamW(lr=1e-3, eps=1e-6, clip_norm=0.5)
LAYOUTS = (("tp2 ep2", 2, 1), ("pp2 ep2", 4, 3))
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 4} | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 67,  # tp2 does not divide it
    "router_aux_loss_coef": 0.0,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


def ids() -> list[Tensor]:
    """Return the sequences of each micro-batch."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(MICRO_BATCHES)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Write a model of transformers, train it there, and return the folder and what came of it."""
    folder = tmp_path_factory.mktemp("theirs")
    config = draw("qwen3_moe", Random("layouts")) | CONFIG | {"mlp_only_layers": []}
    model = reference("qwen3_moe", config | {"decoder_sparse_step": 1}, 4).float()
    model.save_pretrained(folder)
    model.train()
    decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "norm" not in n]
    others = [p for p in model.parameters() if all(p is not q for q in decayed)]
    groups = [
        {"params": decayed, "weight_decay": ADAMW.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
    for _ in range(STEPS):
        optimizer.zero_grad()
        labels = sum(x.shape[0] * (x.shape[1] - 1) for x in ids())
        for x in ids():
            logits = model(x).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum")
            (loss / labels).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5, "clipping takes part"
        optimizer.step()
    return folder, model.eval()


def trained(folder: Path, layout: Layout, world: World) -> ShardedState:
    """Bring a folder's weights into a layout, each rank its own pieces, and make the steps."""
    with import_folder(folder) as found:
        data = ShardedState(build_parts(found.decoder, "fp32", layout, world, "meta"))
        data.fill(lambda piece: found.tensors.read_box(piece.name, piece.box), buffers=True)
    optimizer = data.optimizer(ADAMW)
    mine = [from_ids(x) for x in ids()][world.attention.dp :: world.folding.dp]
    for _ in range(STEPS):
        figures = gradients(data, mine, 16)
        optimizer.step(clip_scale(figures.grad_norm, ADAMW.clip_norm))
        data.refresh_weights()
    return data


def save_all(data: ShardedState, folder: Path) -> None:
    """Write a checkpoint from all ranks."""
    world = data.parts.world
    ranks, lock = world.group("world"), FolderLock(folder, "the test")
    if ranks.index == 0:
        lock.acquire()
    optimizer = data.optimizer(ADAMW)
    meta = describe_model(data.parts.model.record, None)
    what = folder, STEPS, assigned_state(data, optimizer), meta, CheckpointPolicy()
    save(*what, lock=lock, ranks=ranks)


@pytest.mark.parametrize(("sizes", "count", "zero"), LAYOUTS)
def test_logits_are_those_of_transformers_after_the_same_steps(
    tmp_path: Path, theirs: tuple[Path, Any], sizes: str, count: int, zero: int
) -> None:
    from transformers import AutoModelForCausalLM

    source, expected = theirs
    layout = Layout(sizes=sizes, zero=zero)

    def work(ranks: Group) -> None:
        with World.open(Folding(layout.split, count), "cpu", 30.0) as world:
            save_all(trained(source, layout, world), tmp_path / "run")

    assert fork_ranks(work, count, tmp_path) == [0] * count
    export(tmp_path / "run", tmp_path / "ours")
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **how)
    before = AutoModelForCausalLM.from_pretrained(source, **how)
    with torch.no_grad():
        for x in ids():
            wanted = expected(x).logits
            torch.testing.assert_close(again.eval()(x).logits, wanted, rtol=1e-4, atol=1e-4)
            assert (before.eval()(x).logits - wanted).abs().max() > 1e-2, "the steps did something"


@pytest.mark.parametrize(("sizes", "count", "zero"), LAYOUTS)
def test_weights_are_handed_on_from_any_layout_as_they_are(
    tmp_path: Path, theirs: tuple[Path, Any], sizes: str, count: int, zero: int
) -> None:
    """Pain 11: the router stays float32 bit for bit, two hand-overs are the same bytes, no bucket
    is larger than asked, and nothing is missing."""
    source, layout = theirs[0], Layout(sizes=sizes, zero=zero)

    def work(ranks: Group) -> None:
        with World.open(Folding(layout.split, count), "cpu", 30.0) as world:
            data = trained(source, layout, world)
            save_all(data, tmp_path / "run")
            for turn, dtype in enumerate(("bfloat16", "bfloat16", "float32")):
                found, most = taken(stream_weights(data, dtype, "per_expert", 1500))  # type: ignore[arg-type]
                assert (ranks.index == 0) == bool(found)
                if found:
                    save_file(found, tmp_path / f"turn-{turn}")
                    assert 750 < most <= 1500

    assert fork_ranks(work, count, tmp_path) == [0] * count
    export(tmp_path / "run", tmp_path / "ours")
    exact = load_file(tmp_path / "ours" / "model.safetensors")
    turns = [load_file(tmp_path / f"turn-{turn}") for turn in range(3)]
    with import_folder(source) as found:
        said = {sent.name: sent for sent in contract(found.decoder)}
    assert exact.keys() == said.keys() == turns[0].keys()
    for name, values in exact.items():
        wide = name.endswith("mlp.gate.weight")
        kept = torch.float32 if wide else torch.bfloat16
        assert said[name].dtype == kept and said[name].shape == tuple(values.shape)
        assert torch.equal(turns[0][name], values.to(kept)) and turns[0][name].dtype == kept
        assert torch.equal(turns[1][name], turns[0][name])
        assert torch.equal(turns[2][name], values)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_matrices_that_share_a_tensor_come_and_go_by_parts(tmp_path: Path, model_type: str) -> None:
    """Tensor ranks read their heads of a folder, and hand on what lies there."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    wide = {"moe_intermediate_size": 8, "linear_value_head_dim": 6}
    config = draw(model_type, Random("joined")) | sizes | heads | wide
    config |= {"shared_expert_intermediate_size": 8}
    reference(model_type, config, 4).float().save_pretrained(tmp_path / "theirs")
    layout = Layout(sizes="tp2")

    def work(ranks: Group) -> None:
        with World.open(Folding(layout.split, 2), "cpu", 30.0) as world:
            with import_folder(tmp_path / "theirs") as found:
                data = ShardedState(build_parts(found.decoder, "fp32", layout, world, "meta"))
                data.fill(lambda piece: found.tensors.read_box(piece.name, piece.box), buffers=True)
            handed, _ = taken(stream_weights(data, "float32"))
            if ranks.index == 0:
                save_file(handed, tmp_path / "handed")

    assert fork_ranks(work, 2, tmp_path) == [0, 0]
    there = load_file(tmp_path / "theirs" / "model.safetensors")
    handed = load_file(tmp_path / "handed")
    assert handed.keys() == there.keys()
    assert not [name for name, values in handed.items() if not torch.equal(values, there[name])]


def taken(buckets: Any) -> tuple[dict[str, Tensor], int]:
    """Be a consumer: put tensors together from what comes; return the largest bucket's bytes."""
    found: dict[str, Tensor] = {}
    most = 0
    for bucket in buckets:
        most = max(most, bucket.data.numel())
        for span, values in bucket.tensors():
            whole = found.setdefault(
                span.sent.name, torch.empty(span.sent.shape, dtype=span.sent.dtype)
            )
            whole[span.first : span.end] = values
    return found, most


def test_a_consumer_notices_bytes_that_are_not_as_sent(theirs: tuple[Path, Any]) -> None:
    with import_folder(theirs[0]) as found:
        world = World.single()
        data = ShardedState(build_parts(found.decoder, "fp32", Layout(), world, "meta"))
        data.fill(lambda piece: found.tensors.read_box(piece.name, piece.box), buffers=True)
    bucket = next(iter(stream_weights(data, "float32")))
    assert isinstance(bucket, TensorBatch)
    list(bucket.tensors())
    bucket.data[bucket.spans[1].offset] ^= 1
    with pytest.raises(ConvertError, match=bucket.spans[1].sent.name):
        list(bucket.tensors())
    with pytest.raises(ValueError, match=r"bucket_bytes is 8; .* needs at least"):
        next(iter(stream_weights(data, "float32", "per_expert", 8)))


def code(layer: int, expert: int) -> float:
    """Return the value that all weights of an expert have."""
    return layer * 1000.0 + expert


@pytest.mark.parametrize(("sizes", "count", "zero"), LAYOUTS)
def test_every_expert_of_every_rank_is_in_its_place(
    tmp_path: Path, theirs: tuple[Path, Any], sizes: str, count: int, zero: int
) -> None:
    """Saved in a layout, exported to several files: each expert has its own value, and the index
    names all that is there."""
    source, layout = theirs[0], Layout(sizes=sizes, zero=zero)

    def work(ranks: Group) -> None:
        with World.open(Folding(layout.split, count), "cpu", 30.0) as world:
            data = trained(source, layout, world)
            for held in data.weights():
                if ".experts." in held.name:
                    layer = int(held.name.split(".")[1])
                    for row, expert in enumerate(range(*held.box[0])):
                        held.tensor[row] = code(layer, expert)
            data.refresh_weights()
            save_all(data, tmp_path / "run")

    assert fork_ranks(work, count, tmp_path) == [0] * count
    with StoredModel.open(tmp_path / "run") as stored:
        export_folder(stored.decoder, stored.tensors, tmp_path / "ours", shard_bytes=4096)
    files = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    lying = {name: file.name for file in files for name in load_file(file)}
    assert lying == index["weight_map"]
    with import_folder(source) as found:
        assert lying.keys() == {sent.name for sent in contract(found.decoder)}
    checked = 0
    for file in files:
        for name, values in load_file(file).items():
            if ".experts." in name:
                parts = name.split(".")
                assert bool((values == code(int(parts[2]), int(parts[5]))).all()), name
                checked += 1
    assert checked == 2 * 4 * 3
