"""Folders with blocks of further tokens, named as DeepSeek-V3's release names them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.check import check
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.convert.source import ConvertError
from moefold.model.config import Decoder, MultiToken
from moefold.model.families.folder import Folder, read_config
from moefold.model.families.registry import family_of
from moefold.spec.decoder import with_multi_token
from tests.cpu.hubs import VOCAB, decoder_of, on_disk, same_bits, weights_of, write_hub
from tests.cpu.test_convert_export import read_all

OWN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}


def hub(folder: Path, depth: int, dtype: Any = torch.float32) -> tuple[Decoder, dict[str, Tensor]]:
    """Write a folder of three layers and some of further tokens, copies as released."""
    decoder = with_multi_token(decoder_of("deepseek_v3"), [MultiToken()] * depth)
    stored = on_disk(decoder, weights_of(decoder, dtype), dtype=dtype)
    for number in range(3, 3 + depth):
        at = f"model.layers.{number}"
        assert all(f"{at}.{name}.weight" in stored for name in OWN)
        stored |= {f"{at}.{copy}.weight": stored[of].clone() for copy, of in COPIES.items()}
    write_hub(folder, decoder, stored)
    return decoder, stored


@pytest.mark.parametrize(("depth", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_import_then_export_gives_the_same_folder(tmp_path: Path, depth: int, dtype: Any) -> None:
    decoder, stored = hub(tmp_path / "first", depth, getattr(torch, dtype))
    with import_folder(tmp_path / "first") as found:
        assert found.decoder == decoder and family_of(decoder) is type(found.model)
        assert "copies of embedding or head" in " ".join(found.notes)
        export_folder(found.decoder, found.tensors, tmp_path / "second", dtype=dtype)
    written = read_all(tmp_path / "second")
    assert written.keys() == stored.keys()
    assert all(same_bits(tensor, stored[name]) for name, tensor in written.items())
    assert read_config(tmp_path / "second").decoder == decoder


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    decoder, stored = hub(tmp_path, 1)
    stored[f"model.layers.3.{name}.weight"][1, 2] += 1
    write_hub(tmp_path, decoder, stored)
    with import_folder(tmp_path) as found, pytest.raises(ConvertError, match=f"3.{name}.* must"):
        list(found.tensors.values())


def test_what_is_in_no_block_of_a_further_token_is_refused(tmp_path: Path) -> None:
    decoder, stored = hub(tmp_path, 1)
    write_hub(tmp_path, decoder, stored | {"model.layers.3.more.weight": torch.zeros(2)})
    with pytest.raises(ConvertError, match=r"3.more.weight in model.safetensors is not a tensor"):
        import_folder(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_states_what_further_tokens_weigh_or_leaves_them_out(
    tmp_path: Path, shards: int
) -> None:
    decoder, stored = hub(tmp_path, 1)
    (tmp_path / "model.safetensors").unlink()
    write_hub(tmp_path, decoder, stored, shards=shards)
    own = [{"weight": 0.3, "reads": "residual"}]

    def of(said: Any) -> Any:
        return check(Folder, {"family": "folder", "from": str(tmp_path), "multi_token": said})

    assert of(None).record.describe(VOCAB) == decoder
    assert of(own).record.describe(VOCAB).multi_token == (MultiToken.model_validate(own[0]),)
    assert of([]).record.describe(VOCAB) == with_multi_token(decoder, ())
    (broken,) = of(own * 2).violations
    assert broken.path == ("multi_token",) and "block of the folder (1), or none" in broken.rule
    with import_folder(tmp_path, config=of([]).record.read_config()) as found:
        assert len(found.decoder.blocks) == 3 and len(found.left_out) == 1
