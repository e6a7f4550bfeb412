"""An exported folder in other hands: its tokenizer, texts and settings are those of the run."""

import json
from pathlib import Path
from random import Random

import pytest
import tokenizers

from moefold.api import export
from moefold.convert.exporter import _tokenizer_notes
from moefold.data.tokenizer import from_path
from moefold.training.text_generator import TextGenerator
from tests.chats import conversation, write_chat_folder
from tests.cpu.runs import job_of
from tests.tokenizer_folders import CHATML_TEMPLATE

TEXTS = ["the router", "", "expert\n token", "naïve 🙂"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a trained tokenizer, and its export."""
    folder = tmp_path_factory.mktemp("run")
    with job_of(folder, data={"seq": 64}) as job:
        job.train()
        job.save()
    export(folder / "out", folder / "hf")
    return folder


def test_texts_begin_as_training_documents_do(run: Path) -> None:
    from transformers import AutoTokenizer

    trained = TextGenerator.open(run / "out").tokenizer
    there = AutoTokenizer.from_pretrained(run / "hf")
    alone = tokenizers.Tokenizer.from_file(str(run / "hf" / "tokenizer.json"))
    for text in TEXTS:
        (document,) = trained.encode_documents([text])
        assert there(text)["input_ids"] == document[:-1].tolist() == alone.encode(text).ids
        assert [*there(text)] == ["input_ids", "attention_mask"]


@pytest.mark.filterwarnings("ignore")
def test_greedy_texts_of_generate_are_those_of_sample(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator = TextGenerator.open(run / "out")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModelForCausalLM.from_pretrained(run / "hf", experts_implementation="eager")
    for text in TEXTS:
        ids = generator.tokenizer.encode_prompt(text)
        (ours,) = generator.generate([ids], 10, temperature=0)
        given = tokenizer(text, return_tensors="pt")
        theirs = model.eval().generate(**given, max_new_tokens=10, do_sample=False)
        new = theirs[0, given["input_ids"].shape[1] :].tolist()
        ends = generator.tokenizer.end_ids
        assert ours == (new[:-1] if new[-1] in ends else new)


def test_files_of_release_4_and_5_are_there(run: Path) -> None:
    config = json.loads((run / "hf" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    longest = json.loads((run / "hf" / "config.json").read_text())["max_position_embeddings"]
    assert config["model_max_length"] == longest
    settings = json.loads((run / "hf" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == 0


def test_a_run_on_chats_exports_its_template_and_its_end(tmp_path: Path) -> None:
    folder = write_chat_folder(
        tmp_path / "base",
        CHATML_TEMPLATE,
        generation={"eos_token_id": 0},
        eos_token="<|endoftext|>",
    )
    draws = Random("export")
    rows = [{"messages": conversation(draws, 1, system=False)} for _ in range(12)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "chat", "files": [str(file)], "holdout": 0.2}
    data = {"seq": 64, "tokenizer": {"kind": "file", "path": str(folder)}, "train": [source]}
    with job_of(tmp_path, data=data, train={"steps": 3}) as job:
        job.train()
        job.save()
        assert job.tokenizer.ends == ["<|endoftext|>", "<|im_end|>"]
    export(tmp_path / "out", tmp_path / "hf")
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == CHATML_TEMPLATE
    settings = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, 2]
    assert 2 in from_path(str(tmp_path / "hf")).end_ids


def test_a_model_type_that_brings_its_own_words_is_said(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_chat_folder(tmp_path, None)
    found = from_path(str(folder))
    assert _tokenizer_notes(folder, found) == []
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    (note,) = _tokenizer_notes(folder, found)
    assert "Qwen3_5Tokenizer" in note and "PreTrainedTokenizerFast" in note
    there = AutoTokenizer.from_pretrained(folder)
    assert "\\p{M}" in str(there.backend_tokenizer.pre_tokenizer)
