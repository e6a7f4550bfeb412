"""The model card of an export: what it says, what of the base's is kept, what it leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moefold.cli.main import main
from moefold.training.model_card import BASE_LIMIT
from tests.cpu.hubs import decoder_of, on_disk, weights_of, write_hub, write_tokenizer

THEIRS = "---\nlicense: mit\n---\n# Base\n"
WORDS = [f"w{n}" for n in range(30)]


def hub(folder: Path, card: bool = True) -> Path:
    """Write a model's folder, with or without a card."""
    decoder = decoder_of("olmoe")
    write_hub(folder, decoder, on_disk(decoder, weights_of(decoder)))
    if card:
        (folder / "README.md").write_text(THEIRS)
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fast))
    return write_tokenizer(folder, WORDS)


def trained(base: Path, out: Path, *more: str) -> Path:
    """Train a folder for two steps on two sources."""
    sources = []
    for number, name in enumerate(("notes", "a|b`c")):
        file = base.parent / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": "w1 w2 w3 w4 w5"}) + "\n" for _ in range(9)))
        sources.append({"source": "jsonl", "name": f"s{number}", "files": [str(file)]})
    words = [f"data.train={json.dumps(sources)}", "data.seq=8", "train.steps=2", "train.batch=2"]
    assert main(["train", str(base), *words, *more, "--folder", str(out)]) == 0
    return out


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata and the text of a card."""
    _, head, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a folder in the Hub's cache, whose name the folder has."""
    cache = tmp_path_factory.mktemp("card") / "models--some-org--Tiny.MoE" / "snapshots" / "0123"
    return trained(hub(cache), cache.parents[2] / "tuned")


def test_a_card_says_what_was_trained_on_what_and_how_it_is_served(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--layout", "packed"]) == 0
    assert "README.md is a model card; write its licence" in capsys.readouterr().err
    metadata, text = card_of(tmp_path / "out")
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "unknown",
        "tags": ["moefold", "moe"],
        "base_model": "some-org/Tiny.MoE",
        "base_model_relation": "finetune",
    }
    figures = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for said in (
        "| family | `olmoe` |",
        "| experts | 2 of 4 per token in 3 layers |",
        "| stored as | float32, one tensor for all experts |",
        "| steps | 2 |",
        f"| tokens | {figures['tokens']:,} |",
        f"| training loss (nats per token) | {figures['lm_loss']:.4f} |",
        "| `jsonl` | `notes.jsonl` |",
        "| `jsonl` | `a b c.jsonl` |",
        "vllm serve FOLDER",
        "python -m sglang.launch_server --model-path FOLDER",
        "convert_hf_to_gguf.py FOLDER",
        "(its pre-tokenizer) only for tokenizers in its list",
        "is in `README.base.md`",
    ):
        assert said in text, said
    assert str(run.parent) not in text
    assert (tmp_path / "out" / "README.base.md").read_text() == THEIRS


def test_the_hub_reads_the_metadata(run: Path, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    data = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.library_name, data.base_model) == ("transformers", "some-org/Tiny.MoE")
    assert yaml.safe_load(data.to_yaml()) == card_of(tmp_path / "out")[0]


def test_without_a_card_what_is_left_behind_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--no-card"]) == 0
    assert not list((tmp_path / "out").glob("README*"))
    assert "the card of the base model is not copied" in capsys.readouterr().err


def test_a_card_of_adapters_names_their_rank(tmp_path: Path) -> None:
    out = trained(
        hub(tmp_path / "base", card=False), tmp_path / "run", "adapter={kind: lora, rank: 3}"
    )
    assert main(["export", str(out), str(tmp_path / "alone")]) == 0
    metadata, text = card_of(tmp_path / "alone")
    assert metadata["library_name"] == "peft" and "lora" in metadata["tags"]
    assert "base_model" not in metadata  # a folder of this machine is no name on the Hub
    assert "Low-rank adapters of `base`" in text and "--max-lora-rank 8 " in text
    assert not (tmp_path / "alone" / "README.base.md").exists()


def test_an_imported_folders_card_goes_out_again(tmp_path: Path) -> None:
    base = hub(tmp_path / "base")
    (base / "README.md").write_text(THEIRS + "x" * BASE_LIMIT)
    assert main(["import", str(base), str(tmp_path / "checkpoint")]) == 0
    (base / "README.md").unlink()
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    kept = (tmp_path / "out" / "README.base.md").read_text()
    assert kept.startswith(THEIRS) and len(kept) == BASE_LIMIT
    assert "## Training" not in card_of(tmp_path / "out")[1]


def test_a_card_of_a_grown_models_source_is_not_copied_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = hub(tmp_path / "base")
    assert main(["grow", str(base), str(tmp_path / "grown"), "--experts", "8"]) == 0
    assert "README.md, the card of a source, is not copied" in capsys.readouterr().err


def test_the_banner_says_the_unit_of_a_folders_coefficient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """olmoe with three layers, two choices, and 0.01: 0.03 here, 0.02 in transformers."""
    base = hub(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"router_aux_loss_coef": 0.01}
    (base / "config.json").write_text(json.dumps(config))
    trained(base, tmp_path / "run")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "aux_micro_batch: 0.01 in each of 3 layers, 0.03 in total" in said
    assert "transformers the folder's coefficient 0.01 adds 0.02 in total" in said
    assert "0.00666667 in model.balance adds as much here" in said
