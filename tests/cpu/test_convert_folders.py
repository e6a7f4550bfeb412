"""Folders as tools leave them: strange files, infinities, forms of FP8 scales, marks, adapters."""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold.cli.main import main
from moefold.convert.importer import import_folder
from moefold.convert.source import ConvertError
from moefold.model.families.registry import from_hf
from tests.cpu.hubs import decoder_of, on_disk, same_bits, weights_of, write_hub, write_tokenizer

WORDS = [f"w{n}" for n in range(30)]
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder of a small model, with a tokenizer."""
    decoder = decoder_of("mixtral")
    write_hub(tmp_path / "hub", decoder, on_disk(decoder, weights_of(decoder)))
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "hub" / "tokenizer_config.json").write_text(json.dumps(fast))
    return write_tokenizer(tmp_path / "hub", WORDS)


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    """Return the commands that read weights, by name."""
    text = out / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "w1 w2 w3 w4"}) + "\n" for _ in range(8)))
    data = f"data.train=[{{source: jsonl, files: [{text}]}}]"
    sizes = ["data.seq=8", "train.steps=1", "train.batch=1", "--folder", str(out / "run")]
    return {
        "import": ["import", str(folder), str(out / "checkpoint")],
        "sample": ["sample", str(folder), "--prompt", "w1", "--tokens", "2"],
        "grow": ["grow", str(folder), str(out / "grown"), "--experts", "8"],
        "train": ["train", str(folder), data, *sizes],
    }


COMMANDS = ("import", "sample", "grow", "train")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_weights_that_are_no_numbers_are_refused(
    hub: Path, value: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = load_file(hub / "model.safetensors")
    held[Q][1, 2] = float(value)
    save_file(held, hub / "model.safetensors")
    assert main(commands(hub, hub.parent)[command]) == 2
    what = "NaN" if value == "nan" else "an infinity"
    assert f"{Q} in model.safetensors contains {what}" in capsys.readouterr().err


def test_numbers_above_those_of_32_bits_are_refused(tmp_path: Path) -> None:
    decoder = decoder_of("mixtral")
    stored = on_disk(decoder, weights_of(decoder))
    stored[Q] = stored[Q].double()
    stored[Q][0, 0] = 1e300
    write_hub(tmp_path, decoder, stored)
    with import_folder(tmp_path) as found, pytest.raises(ConvertError, match="above the largest"):
        found.tensors["layers.0.attention.q.weight"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    where = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(where)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "what"),
    [(pipe, "named pipe"), (unix_socket, "socket"), (device, "device"), (Path.mkdir, "folder")],
)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "index"])
def test_what_is_no_file_is_refused_at_once(
    hub: Path,
    file: str,
    make: Callable[[Path], None],
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = "model.safetensors.index.json" if file == "index" else file
    shutil.move(hub / "model.safetensors", hub / "kept")
    if file != "model.safetensors.index.json":
        shutil.move(hub / "kept", hub / "model.safetensors")
        (hub / file).unlink()
    make(hub / file)
    began = time.process_time()
    for command in COMMANDS:
        assert main(commands(hub, hub.parent)[command]) == 2
        said = capsys.readouterr().err
        assert f"{file} is not a regular file but a {what}" in said, (command, said)
    assert time.process_time() - began < 8


@pytest.mark.parametrize("name", ["weights.pt", "folder/pytorch_model.bin", "folder/.metadata"])
def test_pickled_weights_that_are_no_files_are_refused_at_once(hub: Path, name: str) -> None:
    path = hub.parent / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    given = path if name == "weights.pt" else path.parent
    with pytest.raises(ConvertError, match=f"{path.name}.* is not a regular file but a named pipe"):
        import_folder(hub, given)


# ---------------------------------------------------------------------------------- FP8 scales

ROWS, COLUMNS = 16, 6
SCALES: dict[str, tuple[list[int], list[int] | None, torch.dtype]] = {
    "blocks": ([2, 2], [8, 3], torch.float32),
    "blocks bf16": ([2, 2], [8, 3], torch.bfloat16),
    "blocks e8m0": ([2, 2], [8, 3], torch.float8_e8m0fnu),
    "blocks bytes": ([2, 2], [8, 3], torch.uint8),
    "smaller blocks at the edges": ([2, 2], [8, 4], torch.uint8),
    "one": ([], None, torch.float32),
    "one of one dim": ([1], None, torch.bfloat16),
    "rows": ([16, 1], None, torch.float32),
    "rows of one dim": ([16], None, torch.float32),
    "rows e8m0": ([16, 1], None, torch.float8_e8m0fnu),
    "columns as one block": ([4, 1], [4, 6], torch.uint8),
}
"""Shape, block size and dtype of an FP8 tensor's scales."""


def drawn_scales(shape: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return powers of two as stored, and as numbers."""
    exponents = torch.randint(-6, 5, shape, generator=torch.Generator().manual_seed(3))
    numbers = torch.exp2(exponents.float())
    stored = (exponents + 127).to(torch.uint8) if dtype == torch.uint8 else numbers.to(dtype)
    return stored, numbers


@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("form", SCALES)
def test_scales_of_each_form_multiply_as_in_transformers(
    form: str, ending: str, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shape, block, dtype = SCALES[form]
    decoder = decoder_of("mixtral")
    stored = on_disk(decoder, weights_of(decoder))
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    codes = (stored[name] * 50).to(torch.float8_e4m3fn)
    scales, numbers = drawn_scales(shape, dtype)
    module = name.removesuffix("weight")
    stored |= {name: codes, module + ending: scales, module + "input_scale": torch.ones(())}
    settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "static"}
    write_hub(tmp_path, decoder, stored, quantization_config=settings)
    with import_folder(tmp_path) as found:
        held = found.tensors["layers.1.moe.experts.w_out"][2]
        assert any("scales of activations" in note for note in found.notes)
    if block is None or not (ROWS % block[0] or COLUMNS % block[1]):
        grid = numbers.view(-1, 1) if len(shape) == 1 else numbers
        want = Fp8Dequantize(None)._dequantize_one(codes, grid, torch.float32)
        assert same_bits(held, want)
    else:  # transformers divides evenly; the blocks at the edges are smaller
        wide = numbers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        assert same_bits(held, codes.float() * wide[:ROWS, :COLUMNS])


@pytest.mark.parametrize("shape", [[4, 2, 4], [4, 1, 1], [4], [4, 12, 1], [1]])
def test_scales_of_packed_experts_multiply(shape: list[int], tmp_path: Path) -> None:
    decoder = decoder_of("qwen3_moe")
    stored = on_disk(decoder, weights_of(decoder), "packed")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = (stored[name] * 50).to(torch.float8_e4m3fn)  # [4, 12, 16]
    scales, numbers = drawn_scales(shape, torch.float8_e8m0fnu)
    stored |= {name: codes, name + "_scale_inv": scales}
    settings = {"quant_method": "fp8", "weight_block_size": [6, 4] if len(shape) == 3 else None}
    write_hub(tmp_path, decoder, stored, quantization_config=settings)
    with import_folder(tmp_path) as found:
        held = found.tensors["layers.0.moe.experts.w_in"]
    if len(shape) == 3:
        numbers = numbers.repeat_interleave(12 // shape[1], 1).repeat_interleave(16 // shape[2], 2)
    else:
        numbers = numbers.view(-1, 1, 1)
    assert same_bits(held, (codes.float() * numbers).view(4, 2, 6, 16))


BAD_SCALES: dict[str, tuple[Tensor, str]] = {
    "shape": (
        torch.ones(3, 2),
        "has shape [3, 2], expected [2, 2] for blocks of 8 x 4, or [16, 1]",
    ),
    "type": (
        torch.ones(2, 2, dtype=torch.int32),
        "is of type I32; supported: F32, BF16, F16, F8_E",
    ),
    "nan": (torch.full((2, 2), torch.nan), "contains NaN; write or copy it again"),
    "inf": (torch.full((2, 2), torch.inf), "contains an infinity; write or copy it again"),
    "e8m0 nan": (torch.full((2, 2), 255, dtype=torch.uint8), "contains NaN; write or copy it"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_scales_that_do_not_fit_are_refused_with_their_file(case: str, tmp_path: Path) -> None:
    scales, said = BAD_SCALES[case]
    decoder = decoder_of("mixtral")
    stored = on_disk(decoder, weights_of(decoder))
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    stored |= {name: stored[name].to(torch.float8_e4m3fn), name + "_scale_inv": scales}
    settings = {"quant_method": "fp8", "weight_block_size": [8, 4]}
    write_hub(tmp_path, decoder, stored, quantization_config=settings)
    with pytest.raises(ConvertError) as caught, import_folder(tmp_path) as found:
        found.tensors["layers.1.moe.experts.w_out"]
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name}_scale_inv in model.safetensors {said}")


# -------------------------------------------------------------------------------------- marks

MARKS: list[dict[str, Any]] = [
    {"unsloth_fixed": True, "unsloth_version": "2026.4.1"},
    {"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}},
    {"_unsloth_temporary_saved_buffers": None},
    {"quantization_config": None},
    {"quantization_config": {}},
    {"quantization_config": {"quant_method": None, "load_in_4bit": False, "llm_int8_threshold": 6}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": False}},
    {"_attn_implementation_autoset": True, "_commit_hash": "0123abcd"},
]


@pytest.mark.parametrize("fields", MARKS, ids=str)
def test_marks_of_tools_are_accepted_with_a_note(fields: dict[str, Any], tmp_path: Path) -> None:
    decoder = decoder_of("mixtral")
    write_hub(tmp_path, decoder, on_disk(decoder, weights_of(decoder)), **fields)
    with import_folder(tmp_path) as found:
        assert found.decoder == decoder
        said = "\n".join(found.left_out)
    assert fields == {"quantization_config": None} or all(name in said for name in fields)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "hf download BASE --local-dir NEW"),
        ({"quant_method": "gptq", "bits": 4}, "hf download BASE --local-dir NEW"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ".dequantize().save_pretrained"),
        ({"quant_method": "compressed-tensors"}, "C(dequantize=True)).save_pretrained"),
        ({"quant_method": "auto-round"}, "'auto-round', which is not read; read are 'fp8'"),
        ({"bits": 4}, "quant_method None, which is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 8]}, "must be two positive integers"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'; supported: 'fp8'"),
    ],
)
def test_other_formats_are_refused_with_what_converts_them(
    settings: dict[str, Any], said: str, hub: Path
) -> None:
    config = json.loads((hub / "config.json").read_text())
    with pytest.raises(ValueError) as caught:
        from_hf(config | {"quantization_config": settings})
    assert said in str(caught.value)


# ----------------------------------------------------------- folders with both kinds of config


@pytest.fixture
def adapter(hub: Path) -> Path:
    """An adapter of the model, with two matrices of one layer."""
    folder = hub.parent / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(hub)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    draws = torch.Generator().manual_seed(2)
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {f"{at}A.weight": (2, 16), f"{at}B.weight": (12, 2)}
    held = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    save_file(held, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("beside", [(), ("optimizer.pt", "training_args.bin", "scheduler.pt")])
def test_an_adapter_beside_its_bases_config_is_an_adapter(
    adapter: Path, hub: Path, beside: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with import_folder(adapter) as found:
        want = dict(found.tensors)
    shutil.copy(hub / "config.json", adapter)
    for name in beside:
        (adapter / name).touch()
    with import_folder(adapter) as found:
        assert all(same_bits(found.tensors[name], want[name]) for name in want)
    assert main(commands(adapter, hub.parent)["sample"]) == 0
    assert main(commands(adapter, hub.parent)["train"]) == 2
    assert f"name its base model: moefold train {hub}" in capsys.readouterr().err


def test_an_adapter_beside_a_model_is_said_wherever_the_folder_is_read(
    adapter: Path, hub: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with import_folder(hub) as found:
        want = dict(found.tensors)
    for file in adapter.iterdir():
        shutil.copy(file, hub)
    with import_folder(hub) as found:
        assert all(same_bits(found.tensors[name], want[name]) for name in want)
    for command, words in commands(hub, hub.parent).items():
        assert main(words) == 0, command
        said = caplog.text + capsys.readouterr().err
        assert "adapter_config.json and adapter_model.safetensors beside the model's" in said
        caplog.clear()
    assert main(["explain", str(hub)]) == 0
    assert "adapter_config.json and adapter_model.safetensors beside" in capsys.readouterr().out
