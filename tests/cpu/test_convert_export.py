"""Checkpoints become Hugging Face folders that hold every bit, and that a reimport finds again."""

import json
import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moefold.convert.exporter import export_folder, staging_folder
from moefold.convert.importer import import_folder
from moefold.convert.source import ConvertError
from moefold.model.config import MODEL
from tests.cpu.checkpoint_tools import run_child
from tests.cpu.hubs import MODELS, decoder_of, on_disk, same_bits, weights_of, write_hub

Layout = Literal["per_expert", "packed"]
TORCH: Any = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_all(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held = load_file(path)
        assert not set(held) & set(found)
        found |= held
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["per_expert", "packed"])
@pytest.mark.parametrize("family", MODELS)
def test_import_then_export_gives_the_same_folder_bit_for_bit(
    tmp_path: Path, family: str, layout: Layout, dtype: Any
) -> None:
    decoder = decoder_of(family)
    stored = on_disk(decoder, weights_of(decoder, TORCH[dtype]), layout, TORCH[dtype])
    write_hub(tmp_path / "first", decoder, stored, eos_token_id=3)
    with import_folder(tmp_path / "first") as found:
        export_folder(
            found.decoder,
            found.tensors,
            tmp_path / "second",
            dtype=dtype,
            layout=layout,
            special_tokens=found.special_tokens,
        )
    written = read_all(tmp_path / "second")
    assert written.keys() == stored.keys()
    for name, tensor in written.items():
        assert same_bits(tensor, stored[name]), name
    first, second = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("first", "second")
    )
    assert second == first | {"torch_dtype": dtype}
    generation = json.loads((tmp_path / "second" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 3}


@pytest.mark.parametrize("family", MODELS)
def test_shards_and_index_hold_what_one_file_holds(tmp_path: Path, family: str) -> None:
    decoder = decoder_of(family)
    weights = weights_of(decoder)
    export_folder(decoder, weights, tmp_path / "one")
    export_folder(decoder, weights, tmp_path / "many", shard_bytes=1500)
    one, many = read_all(tmp_path / "one"), read_all(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(same_bits(one[n], many[n]) for n in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].endswith(f"-of-{len(files):05d}.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    for file in files:
        held = load_file(tmp_path / "many" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(held)
        assert sum(t.nbytes for t in held.values()) <= 1500 or len(held) == 1
    with import_folder(tmp_path / "many") as found:
        assert all(same_bits(found.tensors[n], weights[n]) for n in weights)


def test_the_selection_bias_stays_fp32(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    weights = weights_of(decoder)
    export_folder(decoder, weights, tmp_path / "out", dtype="bfloat16")
    types = {name: tensor.dtype for name, tensor in read_all(tmp_path / "out").items()}
    exact = {name for name, dtype in types.items() if dtype == torch.float32}
    assert exact == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}
    name = "layers.1.moe.router.selection_bias"
    with import_folder(tmp_path / "out") as found:
        assert same_bits(found.tensors[name], weights[name])


class OneAtATime(Mapping[str, Tensor]):
    """Gives out fresh tensors and counts how many are held at once."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.asked, self.most = weights, list[str](), 0
        self._held: list[weakref.ref[Tensor]] = []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        self._held = [r for r in self._held if r() is not None]
        fresh = self.weights[name].clone()
        self._held.append(weakref.ref(fresh))
        self.most = max(self.most, len(self._held))
        return fresh

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("layout", ["per_expert", "packed"])
def test_one_tensor_is_held_at_a_time_and_read_once(tmp_path: Path, layout: Layout) -> None:
    decoder = decoder_of("qwen3_moe")
    tensors = OneAtATime(weights_of(decoder))
    export_folder(decoder, tensors, tmp_path / "out", layout=layout, shard_bytes=4000)
    assert tensors.most == 1
    assert sorted(tensors.asked) == sorted(tensors)


def test_tensors_must_be_exactly_the_decoders(tmp_path: Path) -> None:
    decoder = decoder_of("olmoe")
    weights = weights_of(decoder)
    wrong = weights | {"odd": torch.zeros(1)}
    del wrong["norm.weight"]
    with pytest.raises(ConvertError) as caught:
        export_folder(decoder, wrong, tmp_path / "out")
    assert caught.value.problems == (
        "tensor norm.weight is missing",
        "tensor odd is not part of the model",
    )
    wrong = weights | {"norm.weight": torch.zeros(15)}
    with pytest.raises(ConvertError, match=r"norm\.weight has shape \[15\], expected \[16\]"):
        export_folder(decoder, wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "nothing is left of what failed"


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    decoder = decoder_of("olmoe")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ConvertError, match="already exists"):
        export_folder(decoder, weights_of(decoder), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_folder(decoder, weights_of(decoder), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_what_a_killed_export_leaves_goes_with_the_next(tmp_path: Path) -> None:
    """And what one that is at work has written stays."""

    def die() -> None:
        with staging_folder(tmp_path / "hub") as staged:
            (staged / "config.json").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_child(die) == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    with staging_folder(tmp_path / "hub") as staged:
        assert os.listdir(tmp_path) == [staged.name]
        (staged / "config.json").write_text("whole")
        with staging_folder(tmp_path / "hub") as other:
            (other / "config.json").write_text("first")
        assert staged.is_dir() and not other.exists()
        (tmp_path / "hub" / "config.json").unlink()
    assert os.listdir(tmp_path) == ["hub"]
    assert (tmp_path / "hub" / "config.json").read_text() == "whole"


def test_a_decoder_of_no_family_is_refused(tmp_path: Path) -> None:
    data = {"family": "olmoe", **MODELS["olmoe"], "renormalise": True}
    record: Any = MODEL.kinds["olmoe"].model_validate(data)
    decoder = record.describe(40)
    export_folder(decoder, weights_of(decoder), tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["norm_topk_prob"] is True
    first, *rest = decoder.blocks
    router = first.ffn.router.model_copy(update={"scale": 2.0})
    odd_block = first.model_copy(update={"ffn": first.ffn.model_copy(update={"router": router})})
    stack = decoder.stacks[0].model_copy(update={"repeat": 1, "blocks": (odd_block, *rest)})
    odd = decoder.model_copy(update={"stacks": (stack,)})
    with pytest.raises(ValueError, match=r"layers\[0\]\.ffn\.router\.scale is 2\.0"):
        export_folder(odd, weights_of(odd), tmp_path / "out")


def test_what_cannot_be_written_is_returned_as_notes(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    notes = export_folder(decoder, weights_of(decoder), tmp_path / "out")
    assert [n for n in notes if "bias" in n]


def test_a_type_or_layout_that_no_folder_has_is_refused(tmp_path: Path) -> None:
    decoder = decoder_of("mixtral")
    flat: Any = "flat"
    with pytest.raises(ValueError, match="layout 'flat': must be one of per_expert, packed"):
        export_folder(decoder, weights_of(decoder), tmp_path / "out", layout=flat)
    with pytest.raises(ValueError, match="'float16': must be one of float32, bfloat16"):
        export_folder(decoder, weights_of(decoder), tmp_path / "out", dtype="float16")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
