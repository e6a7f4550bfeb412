"""What is exported loads in transformers with equal logits, and what it saves is imported."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.cli.main import main
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.data.config import BpeTokenizer
from moefold.data.tokenizer import Tokenizer, train
from moefold.model.decoder import DecoderModel
from moefold.model.families.registry import families
from moefold.training.model_checkpoint import StoredModel, fill
from tests.cpu.families import reference
from tests.family_draws import FAMILIES, draw

TEXT = "class Queue:\n    def put(self, item): return item\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE as a run trains it."""
    return train(BpeTokenizer(vocab=270), lambda size: iter([TEXT * 20]))


def ids() -> Tensor:
    return torch.randint(0, 260, (2, 12), generator=torch.Generator().manual_seed(3))


def drawn(model_type: str, **change: Any) -> dict[str, Any]:
    return draw(model_type, Random(f"convert {model_type}")) | {"vocab_size": 272, **change}


def loaded(folder: Path, **more: Any) -> Any:
    """Load a folder in transformers; every parameter must come from it."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **more,
    )
    assert not any(said.values()), said
    return model.eval()


def mine_of(folder: Path) -> DecoderModel:
    with import_folder(folder) as found:
        model = DecoderModel(found.decoder, "fp32")
        fill(model, found.tensors)
    return model


def has_experts_apart(model_type: str) -> bool:
    """Return whether a family's folders may have a tensor for each expert."""
    return any("{e}" in name for row in families()[model_type].tensors for name in row.hf_names)


ON_DISK = [
    pytest.param(name, layout, marks=pytest.mark.matrix if (turn + place) % 2 else [])
    for turn, name in enumerate(FAMILIES)
    for place, layout in enumerate(("per_expert", "packed"))
]


@pytest.mark.parametrize(("model_type", "layout"), ON_DISK)
def test_a_folder_of_transformers_is_imported_exported_and_loads_again(
    tmp_path: Path, model_type: str, layout: Any
) -> None:
    """Its own ``save_pretrained``, in the layout it keeps on disk or in the one it has loaded: by
    turns of families, of which the matrix has both.
    """
    theirs = reference(model_type, drawn(model_type), 4).eval()
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=layout == "per_expert")
    with import_folder(tmp_path / "theirs") as found:
        packed = any(name.endswith("gate_up_proj") for name in found.source.tensors)
        # What a family without a tensor for each expert keeps on disk has names of its own.
        if layout == "packed" or has_experts_apart(model_type):
            assert packed == (layout == "packed")
        export_folder(found.decoder, found.tensors, tmp_path / "ours", layout=layout)
    again = loaded(tmp_path / "ours")
    expected = dict(theirs.state_dict())
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        torch.testing.assert_close(again(ids()).logits, theirs(ids()).logits, rtol=1e-5, atol=1e-5)
        logits = mine_of(tmp_path / "ours").logits(ids())
        scans = "linear_attention" in drawn(model_type).get("layer_types", ())
        bound = 1e-3 if scans else 1e-4  # states magnify what fp32 rounds
        torch.testing.assert_close(logits, theirs(ids()).logits, rtol=bound, atol=bound)


def test_a_gpt_oss_without_windows_runs_there_too(tmp_path: Path) -> None:
    """Its class builds the mask of a window whether or not a layer has one."""
    config = drawn("gpt_oss", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    reference("gpt_oss", config, seed=2).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "here")]) == 0
    assert main(["export", str(tmp_path / "here"), str(tmp_path / "there")]) == 0
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tmp_path / "there")(ids()).logits, mine_of(tmp_path / "there").logits(ids())
        )


def test_bf16_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3", drawn("deepseek_v3"), 5).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    with import_folder(tmp_path / "theirs") as found:
        export_folder(found.decoder, found.tensors, tmp_path / "ours", dtype="bfloat16")
    again = loaded(tmp_path / "ours", dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(again.state_dict()[name].dtype))


def test_the_tokenizer_loads_in_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = reference("olmoe", drawn("olmoe"), 6)
    theirs.save_pretrained(tmp_path / "theirs")
    with import_folder(tmp_path / "theirs") as found:
        export_folder(found.decoder, found.tensors, tmp_path / "ours", tokenizer)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert loaded_tokenizer(TEXT).input_ids == tokenizer.encode_prompt(TEXT)
    assert loaded_tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert loaded_tokenizer.eos_token_id == tokenizer.end_id
    assert loaded(tmp_path / "ours").generation_config.eos_token_id == tokenizer.end_id


def test_the_commands_carry_a_model_there_and_back(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    model_type = "qwen3_moe"
    config = drawn(model_type, eos_token_id=[tokenizer.end_id, 5])
    theirs = reference(model_type, config, 7).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs" / "tokenizer.json")
    checkpoint = tmp_path / "checkpoint"
    assert main(["import", str(tmp_path / "theirs"), str(checkpoint), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["family"] == model_type
    assert said["parameters"] == sum(p.numel() for p in theirs.parameters())
    with StoredModel.open(checkpoint) as stored:
        assert stored.tokenizer is not None
        assert stored.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)

    assert main(["export", str(checkpoint), str(tmp_path / "ours")]) == 0
    again = loaded(tmp_path / "ours")
    assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in again.state_dict().items())
    assert again.config.eos_token_id == [tokenizer.end_id, 5]
    for command in ("import", "export"):
        source = tmp_path / "theirs" if command == "import" else checkpoint
        target = checkpoint if command == "import" else tmp_path / "ours"
        capsys.readouterr()
        assert main([command, str(source), str(target)]) == 2
        assert "already" in capsys.readouterr().err


def test_an_import_says_which_balance_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coefficient that is not there is neither silently off nor silently on."""
    theirs = reference("mixtral", drawn("mixtral"), 8)
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    del config["router_aux_loss_coef"]
    path.write_text(json.dumps(config))
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "checkpoint")]) == 0
    said = capsys.readouterr().err
    assert "config.json has no router_aux_loss_coef" in said
    assert "0.001" in said
