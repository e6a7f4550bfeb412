"""Models that are grown compute what their sources do, and what cannot is refused in words."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold.api import load_model
from moefold.cli.main import main
from moefold.convert.importer import import_folder
from moefold.data.config import BpeTokenizer
from moefold.data.tokenizer import from_path, train
from moefold.files import read_json
from moefold.model.decoder import DecoderModel
from moefold.model.families.dense import read_dense
from moefold.model.families.folder import read_config
from moefold.training.hooks.experts import record_routing
from moefold.training.model_checkpoint import fill
from tests.cpu.families import reference
from tests.family_draws import FAMILIES, draw

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "class Queue:\n    def put(self, item): return item\n"
IDS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def dense(folder: Path, kind: str, seed: int = 0, **more: Any) -> Path:
    """Write a dense model as transformers does."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path, **more: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **more)
    return model(IDS).logits.detach()


def ours(folder: Path) -> Tensor:
    return load_model(folder, "float64").logits(IDS).detach()


def plain(folder: Path) -> Tensor:
    """Return the logits of a dense model by our own layers, all of them in fp64."""
    reading, _ = read_dense(read_json(folder / "config.json"), 2, 2, 1)
    with import_folder(folder, config=reading) as found:
        model = DecoderModel(found.decoder, "fp64")
        fill(model, found.tensors)
    return model.logits(IDS).detach()


def off(have: Tensor, want: Tensor) -> float:
    return float((have - want).norm() / want.norm())


def grown(capsys: Any, *words: Any) -> dict[str, Any]:
    assert main(["grow", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Any, *words: Any) -> str:
    assert main(["grow", *map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "shards"),
    [
        ("Llama", {"rope_theta": 5e5}, 1),
        ("Mistral", {"sliding_window": None, "head_dim": 16}, 4),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, 2),
        ("Qwen3", {"head_dim": 16}, 3),
    ],
)
def test_an_upcycled_model_is_its_dense_one(
    tmp_path: Path, capsys: Any, kind: str, more: dict[str, Any], shards: int
) -> None:
    """Whatever is chosen; 3 is no power of two, which weights in fp32 round."""
    source, new = dense(tmp_path / "dense", kind, **more), tmp_path / "new"
    more_layers = () if shards == 3 else ("--layers", 3)
    said = grown(
        capsys, source, new, "--experts", 4 * shards, "--granularity", shards, *more_layers
    )
    assert off(ours(new), plain(source)) < (1e-7 if shards == 3 else 1e-12)
    # In transformers norms and routers are in fp32.
    assert off(theirs(new, experts_implementation="eager"), theirs(source)) < 1e-6
    assert said["top_k"] == 2 * shards and "no tokenizer" in said["notes"][0]


def test_the_published_factor_is_off_and_says_by_how_much(tmp_path: Path, capsys: Any) -> None:
    source, new = dense(tmp_path / "dense", "Llama"), tmp_path / "new"
    words = ("--experts", 8, "--granularity", 4, "--scale", "cube_root")
    note = grown(capsys, source, new, *words)["notes"][0]
    assert "relative error" in note and float(note.split("error of ")[1].split()[0]) > 0.05
    assert off(ours(new), theirs(source)) > 1e-3


def changed(folder: Path, new: Path, factors: dict[str, float]) -> Path:
    """Copy a model's folder with some projections multiplied."""
    shutil.copytree(folder, new)
    tensors = load_file(new / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in factors.items():
            tensors[name] = tensor * factor if part in name else tensors[name]
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    return new


@pytest.mark.parametrize(
    ("routing", "scale", "bound"),
    [
        ("pre_softmax", "exact", 1e-3),
        ("pre_softmax", "cube_root", 1e-2),
        ("normalised", "cube_root", 1e-2),
    ],
)
def test_the_factor_gives_the_output_of_the_dense_feed_forward(
    tmp_path: Path, capsys: Any, routing: str, scale: str, bound: float
) -> None:
    """With probabilities that are nearly equal; for the root, gates where SiLU is nearly linear.

    Beside what the feed-forwards add to the dense model's logits.
    """
    drawn = dense(tmp_path / "drawn", "Qwen3", head_dim=16, initializer_range=1e-5)
    source = changed(drawn, tmp_path / "dense", {"gate_proj": 1e-3, "down_proj": 1e3})
    without = plain(changed(source, tmp_path / "without", {"down_proj": 0.0}))
    words = ("--experts", 16, "--granularity", 4, "--routing", routing, "--scale", scale)
    note = grown(capsys, source, tmp_path / "new", *words)["notes"][0]
    assert off(ours(tmp_path / "new") - without, plain(source) - without) < bound
    assert float(note.split("relative error of ")[1].split()[0]) < bound


def test_merged_models_have_an_expert_each_and_the_mean_of_all_else(
    tmp_path: Path, capsys: Any
) -> None:
    folders = [dense(tmp_path / str(n), "Llama", seed=n) for n in range(2)]
    said = grown(capsys, *folders, tmp_path / "new", "--experts", 4, "--top-k", 4)
    assert "averaged" in said["notes"][0]
    one, other, new = (load_file(f / "model.safetensors") for f in (*folders, tmp_path / "new"))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(new[name], (one[name] + other[name]) / 2)
    for expert in range(4):
        own = (one, other)[expert % 2]["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(new[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"], own)


WAYS: dict[str, int] = {"experts": 2, "layers": 5, "width-times": 2, "hidden-times": 2}
NOT_ALIKE = {
    # Probabilities are half as many, the bias is not; 1e-6 is added to a sum that is twice as much.
    ("ernie4_5_moe", "experts"), ("lfm2_moe", "experts"),
}  # fmt: skip


def refusal(model: Any, way: str) -> str:
    """Return why a model cannot be grown in some way; empty if it can."""
    if way == "experts" and model.effective_router.groups is not None:
        return "group-limited routing"
    if way == "hidden-times" and getattr(model, "embed_scale", 1) == model.shape.hidden**0.5:
        return "embed_scale is "
    return ""


def check_family(folder: Path, capsys: Any, family: str, way: str) -> None:
    old, new = folder / "old", folder / "new"
    config = draw(family, Random(f"grow {family}")) | {"tie_word_embeddings": False}
    reference(family, config, seed=1).save_pretrained(old)
    model = read_config(old).model
    number = WAYS[way] * (model.shape.experts if way == "experts" else 1)
    words = [old, new, f"--{way}", number]
    if why := refusal(model, way):
        assert why in refused(capsys, *words)
        return
    notes = grown(capsys, *words)["notes"]
    unlike = (family, way) in NOT_ALIKE
    assert any("outputs differ" in note for note in notes) == unlike
    assert unlike or off(ours(new), ours(old)) < 1e-12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text", "deepseek_v3"])
def test_a_mixture_grows_into_one_that_computes_the_same(
    tmp_path: Path, capsys: Any, family: str, way: str
) -> None:
    check_family(tmp_path, capsys, family, way)


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_does_one_of_every_family(tmp_path: Path, capsys: Any, family: str, way: str) -> None:
    check_family(tmp_path, capsys, family, way)


def test_the_experts_that_take_most_of_a_text_are_kept(tmp_path: Path, capsys: Any) -> None:
    """Counted by the model itself: those that are left out took least."""
    old, new, text = tmp_path / "old", tmp_path / "new", tmp_path / "text"
    config = draw("qwen3_moe", Random("kept")) | {
        "vocab_size": 272, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [],
    }  # fmt: skip
    reference("qwen3_moe", config, seed=1).save_pretrained(old)
    train(BpeTokenizer(vocab=270), lambda size: iter([TEXT * 20])).save(old / "tokenizer.json")
    text.write_text(TEXT)
    grown(capsys, old, new, "--experts", 3, "--text", text)
    model, small = load_model(old), load_model(new)
    loads = record_routing(model, [from_path(str(old)).encode(TEXT)])
    for layer, (_, mixture) in zip(loads, small.moe_layers(), strict=True):
        kept = sorted(sorted(range(6), key=lambda e: -layer.load_E[e])[:3])
        whole = dict(model.moe_layers())[int(layer.name)]
        assert torch.equal(mixture.experts.w_in, whole.experts.w_in[kept])
        assert torch.equal(mixture.router.weight, whole.router.weight[kept])
    assert "need --text" in refused(capsys, old, tmp_path / "no", "--experts", 3)
    text.write_bytes(b"\xff")
    said = refused(capsys, old, tmp_path / "no", "--experts", 3, "--text", text)
    assert f"{text}: is not UTF-8 text" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to grow: give --experts"),
        (("--top-k", 2), "--experts: must be given for a dense model"),
        (("--experts", 8, "--granularity", 4, "--top-k", 6), "multiple of --granularity (4)"),
        (("--experts", 8, "--granularity", 4, "--top-k", 6), "nearest: 8"),
        (("--experts", 4, "--granularity", 3), "a multiple of --granularity (3), such as 3"),
        (("--experts", 4, "--granularity", 3), "a copy; nearest: 3"),
        (("--experts", 10, "--granularity", 5), "divide the width of the feed-forward (48); n"),
        (("--experts", 4, "--routing", "pre_softmax"), "is not what mixtral computes"),
        (("--experts", 4, "--layers", 1), "--layers: 1 must be at least the source's 2"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    tmp_path: Path, capsys: Any, words: tuple[Any, ...], said: str
) -> None:
    source = dense(tmp_path / "dense", "Llama")
    assert said in refused(capsys, source, tmp_path / "new", *words)
    assert not (tmp_path / "new").exists()


def test_models_of_other_shapes_or_with_more_in_them_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    one = dense(tmp_path / "one", "Llama")
    other = dense(tmp_path / "other", "Llama", intermediate_size=64)
    words = tmp_path / "new", "--experts", 4
    assert "intermediate_size is 48 and 64" in refused(capsys, one, other, *words)
    assert "a multiple of 3" in refused(capsys, one, one, one, *words)
    tensors = load_file(one / "model.safetensors") | {"model.extra.weight": torch.ones(2)}
    save_file(tensors, one / "model.safetensors", {"format": "pt"})
    said = "model.extra.weight in model.safetensors is not a tensor of the model that config.json"
    assert said in refused(capsys, one, *words)
