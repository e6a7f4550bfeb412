"""Hugging Face folders are imported whole and exactly, or refused with everything that is wrong."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moefold.convert.importer import FolderTensors, import_folder
from moefold.convert.plan import ImportPlan
from moefold.convert.source import ConvertError, SafetensorsWeights
from moefold.model.config import MODEL
from moefold.model.families.names import JoinedRows, TensorPiece
from moefold.model.families.registry import families, from_hf
from tests.cpu.hubs import (
    MODELS,
    decoder_of,
    on_disk,
    same_bits,
    weights_of,
    write_hub,
    write_index,
)
from tests.family_draws import draw

Layout = Literal["per_expert", "packed"]


@pytest.fixture
def olmoe(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A place for a folder, and what belongs into it."""
    decoder = decoder_of("olmoe")
    return tmp_path / "hub", on_disk(decoder, weights_of(decoder))


def test_rows_that_lie_among_others_take_time_by_their_number_alone(tmp_path: Path) -> None:
    stored = torch.arange(2 * 8192.0).view(-1, 1)
    save_file({"qkvz": stored}, tmp_path / "model.safetensors")
    piece = TensorPiece("qkvz", (2 * 8192, 1), (), rows=JoinedRows(16, 512, 512, 1024))
    targets = {"k": torch.empty(8192, 1)}
    plan = ImportPlan({"k": (piece,)}, {}, {}, targets)
    began = time.process_time()
    found = FolderTensors(SafetensorsWeights(tmp_path), plan, {})["k"]
    assert torch.equal(found.view(16, 512), stored.view(16, 2, 512)[:, 1])
    assert time.process_time() - began < 2


def problems(folder: Path) -> list[str]:
    """Return why a folder is refused."""
    with pytest.raises(ConvertError) as caught:
        import_folder(folder)
    return list(caught.value.problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["per_expert", "packed"])
@pytest.mark.parametrize("family", MODELS)
def test_every_tensor_arrives_exactly_from_both_layouts(
    tmp_path: Path, family: str, layout: Layout, dtype: torch.dtype
) -> None:
    decoder = decoder_of(family)
    weights = weights_of(decoder, dtype)
    shards = 3 if layout == "packed" else 1
    write_hub(tmp_path, decoder, on_disk(decoder, weights, layout, dtype), shards=shards)
    with import_folder(tmp_path) as found:
        assert list(found.tensors) == list(weights)
        for name, tensor in found.tensors.items():
            assert same_bits(tensor, weights[name]), name
        assert found.decoder == decoder


def test_each_expert_of_each_layer_is_in_its_place(tmp_path: Path) -> None:
    """Gate is layer * 1000 + expert on disk, up the same and a half, down its negative."""
    decoder = decoder_of("mixtral")
    stored = on_disk(decoder, weights_of(decoder))
    for name, tensor in stored.items():
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
            kind = {"w1": 1.0, "w3": 1.0, "w2": -1.0}[name.split(".")[6]]
            tensor.fill_(kind * (layer * 1000 + expert) + (0.5 if ".w3." in name else 0.0))
    write_hub(tmp_path, decoder, stored)
    with import_folder(tmp_path) as found:
        for layer in range(3):
            w_in = found.tensors[f"layers.{layer}.moe.experts.w_in"]
            w_out = found.tensors[f"layers.{layer}.moe.experts.w_out"]
            for expert in range(4):
                value = float(layer * 1000 + expert)
                assert w_in[expert, 0].unique().tolist() == [value]
                assert w_in[expert, 1].unique().tolist() == [value + 0.5]
                assert w_out[expert].unique().tolist() == [-value]


def test_nothing_missing_left_over_or_of_another_shape_passes(
    olmoe: tuple[Path, dict[str, Tensor]],
) -> None:
    folder, stored = olmoe
    mlp = "model.layers.1.mlp"
    del stored[f"{mlp}.experts.2.up_proj.weight"]
    del stored["model.norm.weight"]
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    stored["model.layers.3.input_layernorm.weight"] = torch.zeros(16)
    stored[f"{mlp}.gate.weight"] = torch.zeros(5, 16)
    stored["lm_head.weight"] = torch.zeros(40, 16, dtype=torch.int8)
    write_hub(folder, decoder_of("olmoe"), stored)
    unknown = "in model.safetensors is not a tensor of the model that config.json describes; "
    unknown += "remove it, or correct config.json"
    assert sorted(problems(folder)) == [
        "lm_head.weight is of type I8; supported: F64, F32, F16, BF16, F8_E4M3",
        f"model.layers.0.self_attn.q_proj.bias {unknown}",
        f"{mlp}.experts.2.up_proj.weight is missing",
        f"{mlp}.gate.weight has shape [5, 16], expected [4, 16]",
        f"model.layers.3.input_layernorm.weight {unknown}",
        "model.norm.weight is missing",
    ]


def test_tensors_that_folders_may_lack_are_zeros_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all layers or in none: a folder that has those of some layers is not whole."""
    family = families()["deepseek_v3"]
    rows = (replace(row, optional=row.param.endswith("bias")) for row in family.tensors)
    monkeypatch.setattr(family, "tensors", tuple(rows))
    decoder = decoder_of("deepseek_v3")
    stored = on_disk(decoder, weights_of(decoder))
    first, *rest = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert rest
    write_hub(tmp_path / "some", decoder, {n: t for n, t in stored.items() if n != first})
    assert problems(tmp_path / "some") == [f"{first} is missing"]
    write_hub(tmp_path / "none", decoder, {n: t for n, t in stored.items() if "_bias" not in n})
    with import_folder(tmp_path / "none") as found:
        biases = [name for name in found.tensors if name.endswith("selection_bias")]
        assert len(biases) == len([first, *rest])
        assert not any(found.tensors[name].any() for name in biases)
        more = f" and {len(rest)} more"
        assert f"not in the folder, and therefore zeros: {biases[0]}{more}" in found.notes


def test_a_released_a_x_k1_has_norms_that_nothing_uses_and_no_selection_bias(
    tmp_path: Path,
) -> None:
    drawn = draw("axk1", Random("released")) | {"model_type": "AXK1"}
    kinds = ["dense", *["sparse"] * (drawn["num_hidden_layers"] - 1)]
    decoder = from_hf(drawn | {"mlp_layer_types": kinds}).decoder
    weights = weights_of(decoder)
    stored = {n: t for n, t in on_disk(decoder, weights).items() if "_bias" not in n}
    after = "model.layers.{}.post_mlp_layernorm.weight"
    assert after.format(1) in stored and after.format(0) not in stored
    stored[after.format(0)] = torch.ones(decoder.hidden)
    write_hub(tmp_path, decoder, stored)
    with import_folder(tmp_path) as found:
        for name, tensor in found.tensors.items():
            expected = torch.zeros_like(tensor) if "selection_bias" in name else weights[name]
            assert same_bits(tensor, expected), name
        unused = f"norms after dense layers, which do not use them): {after.format(0)}"
        assert any(unused in note for note in found.left_out)


def test_a_packed_tensor_beside_single_experts_is_refused(
    olmoe: tuple[Path, dict[str, Tensor]],
) -> None:
    folder, stored = olmoe
    decoder = decoder_of("olmoe")
    whole = "model.layers.0.mlp.experts.gate_up_proj"
    stored[whole] = on_disk(decoder, weights_of(decoder), "packed")[whole]
    write_hub(folder, decoder, stored)
    assert len(problems(folder)) == 8
    said = {p.split(" is ")[1].partition(";")[0] for p in problems(folder)}
    assert said == {"not a tensor of the model that config.json describes"}


def test_a_part_that_is_not_written_stays_nan_and_is_refused(
    olmoe: tuple[Path, dict[str, Tensor]],
) -> None:
    """The plan rules this out; the NaN that a tensor starts with is the second line."""
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored)
    name = "layers.0.moe.experts.w_in"
    with import_folder(folder) as found:
        parts: Any = found.tensors._plan.parts
        parts[name] = parts[name][:-1]
        with pytest.raises(ConvertError, match="contains NaN"):
            found.tensors[name]


def test_nan_on_disk_is_refused_by_name(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    sick = "model.layers.2.mlp.experts.1.up_proj.weight"
    stored[sick][0, 0] = torch.nan
    write_hub(folder, decoder_of("olmoe"), stored)
    with import_folder(folder) as found:
        with pytest.raises(ConvertError) as caught:
            found.tensors["layers.2.moe.experts.w_in"]
        assert caught.value.problems == (
            f"{sick} in model.safetensors contains NaN; write or copy it again",
        )


def test_one_tensor_is_read_at_a_time(
    olmoe: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored, shards=2)
    reads: list[str] = []
    read = SafetensorsWeights.read_box
    noted = lambda self, n, box: (reads.append(n), read(self, n, box))[1]  # noqa: E731
    monkeypatch.setattr(SafetensorsWeights, "read_box", noted)
    with import_folder(folder) as found:
        assert reads == []
        found.tensors["layers.1.attention.k_norm.weight"]
        assert reads == ["model.layers.1.self_attn.k_norm.weight"]
        reads.clear()
        for name in found.tensors:
            found.tensors[name]
    assert sorted(reads) == sorted(stored)


@pytest.mark.parametrize("layout", ["per_expert", "packed"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "qwen3_moe"])
def test_a_box_is_read_as_it_stands_in_the_whole_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: Any
) -> None:
    """Every kind of tensor, cut along each dim; a rank reads no more elements than it holds."""
    decoder = decoder_of(family)
    stored = on_disk(decoder, weights_of(decoder), layout)
    folder = write_hub(tmp_path / "hub", decoder, stored)
    elements: list[int] = []
    read = SafetensorsWeights.read_box

    def noted(self: SafetensorsWeights, name: str, box: Any) -> Tensor:
        found = read(self, name, box)
        elements.append(found.numel())
        return found

    monkeypatch.setattr(SafetensorsWeights, "read_box", noted)
    with import_folder(folder) as found:
        for name in found.tensors:
            whole = found.tensors[name]
            for dim, size in enumerate(whole.shape):
                for cut in ((0, (size + 1) // 2), ((size + 1) // 2, size)):
                    box = [(0, n) for n in whole.shape]
                    box[dim] = cut
                    elements.clear()
                    part = found.tensors.read_box(name, tuple(box))
                    assert same_bits(part, whole[tuple(slice(*ends) for ends in box)])
                    heads = 2 if decoder.tied and name == "embed.weight" else 1
                    assert sum(elements) <= heads * part.numel()


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    stored = on_disk(decoder, weights_of(decoder))
    stored["model.layers.3.embed_tokens.weight"] = torch.zeros(3)
    stored["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(3)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    write_hub(tmp_path, decoder, stored, num_nextn_predict_layers=1)
    with import_folder(tmp_path) as found:
        said = "\n".join(found.notes)
    assert "tensors left out (layers for multi-token prediction): " in said
    assert "tensors left out (rotary frequencies, which" in said


@pytest.mark.parametrize("inside", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_larger_one_is_read(tmp_path: Path, inside: str) -> None:
    """Its other parts are left out; what is of no part is refused with its own name."""
    decoder = decoder_of("olmoe")
    values = weights_of(decoder)
    plain = on_disk(decoder, values)
    stored = {re.sub(r"^model\.", inside, name): tensor for name, tensor in plain.items()}
    stored["model.visual.patch.weight"] = torch.zeros(3)
    folder = write_hub(tmp_path, decoder, stored)
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "any_vl", "tie_word_embeddings": inner.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    with import_folder(folder) as found:
        assert not [name for name in values if not same_bits(found.tensors[name], values[name])]
        said = "\n".join(found.notes)
    assert "only the text_config of any_vl is read" in said
    assert "tensors left out (not part of the language model): model.visual.patch.weight" in said
    stored[f"{inside}extra.weight"] = torch.zeros(3)
    write_hub(tmp_path, decoder, stored)
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    (said,) = problems(folder)
    assert said.startswith(f"{inside}extra.weight in model.safetensors is not a tensor of the")
    stored["model.norm.weight"] = stored[f"{inside}norm.weight"].clone()
    write_hub(tmp_path, decoder, stored)
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    assert "is also stored as" in problems(folder)[0]


def test_a_tied_head_may_be_stored_only_where_it_is_the_embedding(tmp_path: Path) -> None:
    decoder = decoder_of("qwen3_moe")
    stored = on_disk(decoder, weights_of(decoder))
    embedding = stored["model.embed_tokens.weight"]
    write_hub(tmp_path / "same", decoder, stored | {"lm_head.weight": embedding.clone()})
    write_hub(tmp_path / "other", decoder, stored | {"lm_head.weight": embedding + 1})
    with import_folder(tmp_path / "same") as found:
        assert same_bits(found.tensors["embed.weight"], embedding)
        assert "head.weight" not in found.tensors
        assert any("(tied to the embedding): lm_head.weight" in n for n in found.notes)
    with (
        import_folder(tmp_path / "other") as found,
        pytest.raises(ConvertError, match="must equal the embedding"),
    ):
        found.tensors["embed.weight"]


def test_fp8_is_multiplied_out_with_its_scales(tmp_path: Path) -> None:
    decoder = decoder_of("deepseek_v3")
    stored = on_disk(decoder, weights_of(decoder))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    codes = (stored[name] * 50).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    stored |= {name: codes, name + "_scale_inv": scales}
    quantised = {"quant_method": "fp8", "weight_block_size": [8, 4]}
    write_hub(tmp_path, decoder, stored, quantization_config=quantised)
    with import_folder(tmp_path) as found:
        whole = found.tensors["layers.1.moe.experts.w_out"]
        assert any("FP8 tensors dequantised with their block scales: 1" in n for n in found.notes)
    assert codes.shape == (16, 6)
    for row in range(16):
        for column in range(6):
            expected = codes[row, column].float() * scales[row // 8, column // 4]
            assert whole[2, row, column] == expected
    del stored[name + "_scale_inv"]
    write_hub(tmp_path, decoder, stored, quantization_config=quantised)
    assert problems(tmp_path) == [f"{name}_scale_inv is missing"]
    write_hub(tmp_path, decoder, stored)
    (said,) = problems(tmp_path)
    assert said == f"{name}_scale_inv is missing"
    stored[name + "_scale_inv"] = scales
    write_hub(tmp_path, decoder, stored)
    (said,) = problems(tmp_path)
    assert "has shape [2, 2], expected [16, 1] or [1], as config.json has no weight_block" in said


def test_fp8_of_gate_above_up_is_multiplied_out(tmp_path: Path) -> None:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "experts": 4, "top_k": 2}
    sizes |= {"expert_width": 6, "shared_width": 10}
    family: Any = MODEL.kinds["granitemoeshared"]
    decoder = family.model_validate({"shape": sizes}).describe(40)
    stored = on_disk(decoder, weights_of(decoder))
    name = "model.layers.0.shared_mlp.input_linear.weight"
    codes = (stored[name] * 50).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0], [8.0, 0.25]])
    stored |= {name: codes, name + "_scale_inv": scales}
    quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    write_hub(tmp_path, decoder, stored, quantization_config=quantised)
    spread = scales.repeat_interleave(8, 0)[:20].repeat_interleave(8, 1)
    with import_folder(tmp_path) as found:
        whole = found.tensors["layers.0.moe.shared.w_in"]
    assert torch.equal(whole, (codes.float() * spread).reshape(2, 10, 16))


# ---------------------------------------------------------------- hostile folders


def test_names_stay_inside_the_folder(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored)
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    files = (
        "../outside.safetensors",
        "/etc/passwd",
        "a\\b.safetensors",
        "c:x.safetensors",
        7,
        "w.bin",
    )
    for file in files:
        write_index(folder, dict.fromkeys(stored, file))
        found = problems(folder)
        assert len(found) == len(stored)
        assert all("is not a safetensors file name" in p for p in found)


def test_the_index_and_the_files_agree(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    moved = next(n for n, f in index.items() if f == first)
    write_index(folder, index | {moved: second, "ghost": first})
    assert sorted(problems(folder)) == [
        f"ghost is not in {first}, where model.safetensors.index.json lists it",
        f"{moved} is in {first}, where model.safetensors.index.json does not list it",
        f"{moved} is not in {second}, where model.safetensors.index.json lists it",
    ]
    (folder / second).unlink()
    write_index(folder, index)
    assert problems(folder) == [f"{second} is missing"]
    write_index(folder, {})
    assert problems(folder) == ["model.safetensors.index.json has no weight_map"]


def test_a_tensor_in_two_files_is_refused(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    held = {n: stored[n].contiguous() for n, f in index.items() if f == second}
    double = next(n for n, f in index.items() if f == first)
    save_file(held | {double: stored[double]}, folder / second)
    assert f"{double} is both in {first} and in {second}" in problems(folder)


def test_damaged_files_are_refused_by_name(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-5], whole[:100], b"", (10**15).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(damaged)
        (found,) = problems(folder)
        assert found.startswith("model.safetensors: ")
    path.write_bytes((10**8 + 1).to_bytes(8, "little") + whole[8:])
    assert "header too large" in problems(folder)[0]


def test_pickles_are_not_read(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored)
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    with import_folder(folder) as found:
        assert any("pickled files are not read: pytorch_model.bin" in n for n in found.notes)
    (folder / "model.safetensors").unlink()
    assert "only pickled weights (pytorch_model.bin)" in problems(folder)[0]
    (folder / "pytorch_model.bin").unlink()
    assert "neither model.safetensors nor" in problems(folder)[0]


def test_code_in_the_folder_is_never_run(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    auto_map = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}
    write_hub(folder, decoder_of("olmoe"), stored, auto_map=auto_map)
    (folder / "planted.py").write_text("raise SystemExit('run')\n")
    with import_folder(folder) as found:
        assert any("never run: planted.py" in n for n in found.notes)
        assert any("auto_map" in n for n in found.notes)
    assert "planted" not in sys.modules


def test_both_kinds_of_weights_are_one_too_many(olmoe: tuple[Path, dict[str, Tensor]]) -> None:
    folder, stored = olmoe
    write_hub(folder, decoder_of("olmoe"), stored)
    write_index(folder, dict.fromkeys(stored, "model.safetensors"))
    assert "both" in problems(folder)[0]
