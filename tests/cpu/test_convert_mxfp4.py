"""Experts that lie as MXFP4 codes, as gpt-oss is released: read exactly, or refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.convert.importer import dequantise_mxfp4, import_folder
from moefold.convert.source import ConvertError
from moefold.model.config import MODEL, Decoder
from tests.cpu.hubs import on_disk, weights_of, write_hub

AT = "model.layers.1.mlp.experts."
STORED = json.loads((Path(__file__).parents[1] / "data" / "mxfp4.json").read_text())
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def number(byte: int, second: bool, scale: int) -> float:
    """Return half a byte times two to the scale: sign, two bits of exponent, one of mantissa."""
    bits = byte // 16 if second else byte % 16
    sign, exponent, mantissa = bits // 8, bits // 2 % 4, bits % 2
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return (-size if sign else size) * 2.0 ** (scale - 127)


def decoder() -> Decoder:
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
    sizes |= {"experts": 2, "top_k": 2, "expert_width": 32}
    record = MODEL.kinds["gpt_oss"].model_validate({"family": "gpt_oss", "shape": sizes})
    return record.describe(40)  # type: ignore[attr-defined,no-any-return]


def coded(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the folder with drawn codes in place of one layer's experts."""
    drawn = torch.Generator().manual_seed(3)
    for name in ("gate_up_proj", "down_proj"):
        experts, inner, outer = stored.pop(AT + name).shape
        shape = (experts, outer, inner // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        scales = torch.randint(120, 130, shape, generator=drawn, dtype=torch.uint8)
        stored |= {f"{AT}{name}_blocks": codes, f"{AT}{name}_scales": scales}
    return stored


def test_codes_are_what_transformers_makes_of_them() -> None:
    codes = torch.tensor(STORED["blocks"], dtype=torch.uint8).unflatten(2, (1, 16))
    scales = torch.tensor(STORED["scales"], dtype=torch.uint8)[..., None]
    assert torch.equal(dequantise_mxfp4(codes, scales), torch.tensor(STORED["values"]))


def test_codes_arrive_as_numbers_in_their_places(tmp_path: Path) -> None:
    """Each number unpacked by hand; gate and up lie by turns along a row of codes' rows."""
    described = decoder()
    stored = coded(on_disk(described, weights_of(described)))
    write_hub(tmp_path, described, stored, **CONFIG)
    with import_folder(tmp_path) as found:
        assert "MXFP4 tensors dequantised with their block scales: 2" in found.notes
        w_in, w_out = (found.tensors[f"layers.1.moe.experts.{n}"] for n in ("w_in", "w_out"))
        half = ((1, 2), (1, 2), (4, 20), (7, 40))
        part = found.tensors.read_box("layers.1.moe.experts.w_in", half)
    assert torch.equal(part, w_in[1:2, 1:2, 4:20, 7:40])
    for name, matrix in (("gate_up_proj", w_in), ("down_proj", w_out)):
        codes, scales = (stored[f"{AT}{name}_{end}"].tolist() for end in ("blocks", "scales"))
        for e, row in ((0, 0), (1, 1), (1, 30), (0, 31)):
            for column in range(32):
                block, place = divmod(column, 32)
                byte = codes[e][row][block][place // 2]
                expected = number(byte, place % 2 == 1, scales[e][row][block])
                at = (e, row % 2, row // 2, column) if matrix.dim() == 4 else (e, row, column)
                assert matrix[at] == expected


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_codes_without_scales_are_refused_with_file_and_remedy(tmp_path: Path, name: str) -> None:
    described = decoder()
    stored = coded(on_disk(described, weights_of(described)))
    del stored[f"{AT}{name}_scales"]
    write_hub(tmp_path, described, stored, **CONFIG)
    with pytest.raises(ConvertError) as caught:
        import_folder(tmp_path)
    (problem,) = caught.value.problems
    assert f"{AT}{name}_scales is missing" in problem
    assert "model.safetensors" in problem
    assert "download the file that has it" in problem


def test_codes_of_another_shape_or_type_and_scales_that_are_no_number(tmp_path: Path) -> None:
    described = decoder()
    stored = coded(on_disk(described, weights_of(described)))
    broken = dict(stored)
    broken[f"{AT}down_proj_scales"] = stored[f"{AT}down_proj_scales"].to(torch.int8)
    broken[f"{AT}gate_up_proj_blocks"] = stored[f"{AT}gate_up_proj_blocks"][..., :8].clone()
    write_hub(tmp_path, described, broken, **CONFIG)
    with pytest.raises(ConvertError) as caught:
        import_folder(tmp_path)
    assert sorted(caught.value.problems) == [
        f"{AT}down_proj_scales is of type I8; supported: U8",
        f"{AT}gate_up_proj_blocks has shape [2, 64, 2, 8], expected [2, 64, 2, 16]",
    ]
    stored[f"{AT}down_proj_scales"][1, 2, 0] = 255
    write_hub(tmp_path, described, stored, **CONFIG)
    with (
        import_folder(tmp_path) as found,
        pytest.raises(ConvertError, match=r"down_proj_scales in model\.safetensors contains NaN"),
    ):
        found.tensors["layers.1.moe.experts.w_out"]
