"""The way back: what lies beside a folder's tokenizer survives import, training and export."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moefold.api import export
from moefold.cli.main import main
from moefold.config.load import load
from moefold.data.tokenizer import from_path
from moefold.run import Run
from moefold.training.model_checkpoint import StoredModel
from moefold.training.trainer import Trainer
from tests.chats import CHATML, write_chat_folder
from tests.cpu.families import reference
from tests.cpu.runs import raw_run
from tests.family_draws import draw

SEVERAL = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML},
]
IM_END, END = 2, 0


def drawn_folder(folder: Path, number: int) -> Path:
    """A model of transformers with a tokenizer whose files say it in one of several ways."""
    draws = Random(f"the way back {number}")
    ends = draws.choice(([IM_END, END], [END, IM_END], IM_END))
    generation: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    config = draw("qwen3_moe", draws) | {"vocab_size": 352}
    config["eos_token_id"] = draws.choice((IM_END, [IM_END, END]))
    if draws.random() < 0.5:
        config["bos_token_id"] = END
    own = reference("qwen3_moe", config, number)
    own.save_pretrained(folder)
    said: dict[str, Any] = {"pad_token": "<|endoftext|>", "model_max_length": 64}
    if draws.random() < 0.5:
        said["bos_token"] = "<|endoftext|>"
    template: str | None = CHATML
    if number % 3:
        template, said["chat_template"] = None, SEVERAL if number % 3 == 1 else CHATML
    return write_chat_folder(
        folder, template, generation=generation | {"eos_token_id": ends}, **said
    )


@pytest.mark.parametrize("number", range(6))
def test_template_settings_and_end_tokens_come_back(tmp_path: Path, number: int) -> None:
    folder = drawn_folder(tmp_path / "theirs", number)
    assert main(["import", str(folder), str(tmp_path / "imported")]) == 0
    raw = raw_run(tmp_path, train={"steps": 3})
    raw["model"] = {"family": "folder", "from": str(folder)}
    raw["data"]["tokenizer"] = {"kind": "file", "path": str(folder)}
    with Trainer(load(Run, raw).record, tmp_path / "out", cache=tmp_path / "prepared") as job:
        job.train()
        job.save()
    for source in ("imported", "out"):
        back = tmp_path / f"back of {source}"
        export(tmp_path / source, back)
        for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
            assert (back / name).exists() == (folder / name).exists()
            if (folder / name).exists() and name != "tokenizer_config.json":
                assert (back / name).read_bytes() == (folder / name).read_bytes(), name
        before, after = (
            json.loads((each / "tokenizer_config.json").read_text()) for each in (folder, back)
        )
        inputs = {"model_input_names": ["input_ids", "attention_mask"]}  # for release 4
        assert after == before | inputs
        for name in ("generation_config.json", "config.json"):
            before, after = (json.loads((f / name).read_text()) for f in (folder, back))
            if name == "config.json":  # other keys are the family's
                keys = ("bos_token_id", "eos_token_id", "pad_token_id")
                before, after = ({k: f.get(k) for k in keys} for f in (before, after))
            assert after == before, name
        same_for_transformers(folder, back)


def same_for_transformers(folder: Path, back: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (back, folder))
    assert ours.chat_template == theirs.chat_template is not None
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    settings = [GenerationConfig.from_pretrained(f).to_diff_dict() for f in (back, folder)]
    assert settings[0] == settings[1]


def test_all_end_tokens_are_known_and_no_start_is_invented(tmp_path: Path) -> None:
    folder = drawn_folder(tmp_path / "theirs", 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, IM_END]}))
    assert main(["import", str(folder), str(tmp_path / "imported")]) == 0
    with StoredModel.open(tmp_path / "imported") as stored:
        assert stored.tokenizer is not None
        assert set(stored.tokenizer.end_ids) == {IM_END, END}
        assert stored.tokenizer.end_id == IM_END
    bare = write_chat_folder(tmp_path / "bare", None)
    assert from_path(str(bare)).start is None
    assert from_path(str(bare)).encode_prompt("gate") == from_path(str(bare)).encode("gate")


def test_code_of_the_folder_is_left_behind(tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["theirs.TheirTokenizer", None]}
    folder = write_chat_folder(tmp_path, auto_map=code, tokenizer_class="TheirTokenizer")
    said = from_path(str(folder)).files.json("tokenizer_config.json")
    assert "auto_map" not in said and said["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_another_end_is_added_to_those_of_the_folder(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "a", generation={"eos_token_id": 0, "top_k": 3})
    found = from_path(str(folder), end="<|im_start|>")
    assert set(found.end_ids) == {0, 1}
    out = tmp_path / "b"
    out.mkdir()
    assert found.files.write(out, found.end_id, 8)["eos_token_id"] == 1
    said = json.loads((out / "generation_config.json").read_text())
    assert said == {"eos_token_id": [0, 1], "top_k": 3}
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert (said["eos_token"], said["model_max_length"]) == ("<|im_start|>", 8)
