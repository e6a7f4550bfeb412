"""A folder's tokenizer is the one that ``AutoTokenizer`` makes of its files."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from moefold.cli.main import main
from moefold.data.chats.conversations import chat_template, encode_pairs
from moefold.data.chats.renderer import Renderer
from moefold.data.config import DataError
from moefold.data.tokenizer import Tokenizer, from_path
from tests.chats import conversation, words
from tests.tokenizer_folders import END_OF_TEXT, FOLDERS, byte_level, special, write

HARD = [
    "",
    " ",
    "  two  spaces ",
    "a\n\nb\tc",
    "don't 1234567 5%",
    "naïve où 日本語 🙂",
    "e\u0301 cafe\u0301s",
    "the <tool_call> and <think>, <|tool|> <|obs|> <image> <|padding|>",
    "▁▁ <0x41> ##ing",
]


@pytest.fixture(scope="module", params=FOLDERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Tokenizer, Any]]:
    """A folder's tokenizer here, and there."""
    folder = FOLDERS[request.param](tmp_path_factory.mktemp(request.param))
    yield from_path(str(folder)), AutoTokenizer.from_pretrained(folder)


def texts(seed: str) -> list[str]:
    draws = Random(seed)
    return [*HARD, *(words(draws) + draws.choice(["", " ", "\n", "."]) for _ in range(12))]


def with_special(theirs: Any, seed: str) -> list[str]:
    """Return texts that contain special tokens."""
    draws = Random(seed)
    special = theirs.all_special_tokens
    return [words(draws) + draws.choice(["", " "]) + t + words(draws, 2) for t in special]


def test_texts_have_the_ids_of_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    for text in (*texts("text"), *with_special(theirs, "special")):
        assert ours.encode_prompt(text) == theirs(text)["input_ids"], text
        body = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == body, text
        end = [] if theirs(text)["input_ids"][-1:] == [ours.end_id] else [ours.end_id]
        (document,) = ours.encode_documents([text])
        assert document.tolist() == [*theirs(text)["input_ids"], *end], text


def test_pairs_are_those_of_trl(both: tuple[Tokenizer, Any]) -> None:
    """TRL 1.16: the end is added unless it is there, and labels begin where the ids differ."""
    ours, theirs = both
    draws = Random("pairs")
    end = theirs.eos_token
    for _ in range(10):
        prompt = words(draws, 3) + draws.choice(["", " ", "\n"])
        completion = draws.choice(["", " "]) + words(draws, 3) + draws.choice(["", end])
        whole = completion if completion.endswith(end) else completion + end
        alone, joint = (theirs(t)["input_ids"] for t in (prompt, prompt + whole))
        shared = next(
            (n for n, (a, b) in enumerate(zip(alone, joint, strict=False)) if a != b), len(alone)
        )
        ((ids, mask),) = encode_pairs([(prompt, whole)], ours)
        assert ids.tolist() == joint
        assert mask.tolist() == [n >= shared for n in range(len(joint))]


def test_conversations_have_the_ids_of_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    draws = Random("chats")
    with Renderer(chat_template(ours)) as renderer:
        for _ in range(6):
            messages = conversation(draws, system=False)
            wanted = theirs.apply_chat_template(messages)["input_ids"]
            ((ids, _),) = ours.encode_chats([renderer.text_of(messages)])
            assert ids.tolist() == wanted


def test_named_tokens_and_sizes_are_those_of_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    assert ours.files.special_tokens() == theirs.special_tokens_map
    assert ours.end == theirs.eos_token
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert {i: t for t, i in theirs.get_vocab().items()}[ours.size - 1]


def test_decoded_texts_are_those_of_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    for text in texts("decoded"):
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_stored_and_exported_folder_is_read_alike(
    both: tuple[Tokenizer, Any], tmp_path: Path
) -> None:
    ours, theirs = both
    (tmp_path / "tokenizer.json").write_text(ours.text, encoding="utf-8")
    ours.files.write(tmp_path, ours.end_id, 64)
    model_type = ours.files.json("config.json").get("model_type")
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    back = AutoTokenizer.from_pretrained(tmp_path)
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    alone.encode_special_tokens = ours.files.splits_special
    read = from_path(str(tmp_path))
    for text in (*texts("exported"), *with_special(theirs, "exported")):
        ids = theirs(text)["input_ids"]
        assert back(text)["input_ids"] == ids
        assert read.encode_prompt(text) == ids
        assert alone.encode(text).ids == ids
    assert back.chat_template == theirs.chat_template


def changed(folder: Path, name: str, content: Any) -> None:
    """Write a file of a folder, or change fields of the JSON object that it holds."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    if isinstance(content, dict) and file.is_file():
        content = json.loads(file.read_text()) | content
    file.write_text(content if isinstance(content, str) else json.dumps(content))


CONFIG = "tokenizer_config.json"
CONTRADICTIONS: dict[str, tuple[str, str, Any, str]] = {
    "an id of another token": (
        "llama3",
        CONFIG,
        {"added_tokens_decoder": {"5": {"content": "<new>", "special": True}}},
        r"added_tokens_decoder has '<new>' with the id 5, but tokenizer\.json gives it the id",
    ),
    "an id beyond the next one": (
        "granite",
        "added_tokens.json",
        {"<new>": 900},
        r"added_tokens\.json has '<new>' with the id 900, but tokenizer\.json gives it the id",
    ),
    "two tokens with one id": (
        "granite",
        "added_tokens.json",
        {"<new>": 1},
        r"added_tokens\.json has '<new>' with the id 1, but tokenizer\.json leaves it out",
    ),
    "an id that is no number": (
        "granite",
        "added_tokens.json",
        {"<new>": "7"},
        r"added_tokens\.json: '<new>' has the id '7'",
    ),
    "a decoder without ids": (
        "llama3",
        CONFIG,
        {"added_tokens_decoder": {"a": "<new>"}},
        r"tokenizer_config\.json: added_tokens_decoder has the id 'a'; name a number",
    ),
    "a decoder that is a list": (
        "llama3",
        CONFIG,
        {"added_tokens_decoder": []},
        r"added_tokens_decoder is \[\], not of type dict",
    ),
    "a token that is a number": (
        "llama3",
        CONFIG,
        {"bos_token": 5},
        r"tokenizer_config\.json: bos_token is 5, which is no token",
    ),
    "extra tokens as text": (
        "gemma",
        CONFIG,
        {"extra_special_tokens": "<image>"},
        r"extra_special_tokens is '<image>', not of type list or dict",
    ),
    "a number of extra tokens": (
        "granite",
        CONFIG,
        {"extra_special_tokens": [3]},
        r"extra_special_tokens is 3, which is no token",
    ),
    "a class that needs a BPE": (
        "unigram",
        CONFIG,
        {"tokenizer_class": "LlamaTokenizer"},
        r"reads it with LlamaTokenizer.* builds a BPE, but tokenizer\.json has .* Unigram",
    ),
    "a class that is not supported": (
        "unigram",
        CONFIG,
        {"tokenizer_class": "T5TokenizerFast"},
        r"tokenizer_class is T5Tokenizer, .* not supported; set tokenizer_class",
    ),
    "files for some releases": (
        "llama3",
        CONFIG,
        {"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]},
        r"fast_tokenizer_files names other files",
    ),
    "an end token that is missing": (
        "wordpiece",
        CONFIG,
        {"eos_token": None},
        r"tokenizer\.json: has no known end token; set data\.tokenizer\.end|has the end tokens",
    ),
    "a template for tools alone": (
        "llama3",
        "additional_chat_templates/tool_use.jinja",
        "{{ tools }}",
        "",
    ),
    "a map that is a list": ("granite", "special_tokens_map.json", "[]", r"special_tokens_map"),
    "a config that is cut off": ("llama3", CONFIG, '{"bos_token": ', r"tokenizer_config\.json"),
    "a flag that is text": (
        "llama3",
        CONFIG,
        {"split_special_tokens": "no"},
        r"split_special_tokens is 'no', not of type bool",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, name: str) -> None:
    folder, file, content, message = CONTRADICTIONS[name]
    FOLDERS[folder](tmp_path)
    changed(tmp_path, file, content)
    if not message:
        (tmp_path / "chat_template.jinja").unlink()
        with pytest.raises(
            DataError, match=r"but no default; save the one .* chat_template\.jinja"
        ):
            chat_template(from_path(str(tmp_path)))
        return
    with pytest.raises(DataError, match=message):
        from_path(str(tmp_path))
    run = ["data", "prepare", "tiny", f"data.tokenizer={{kind: file, path: {tmp_path}}}"]
    assert main([*run, "--folder", str(tmp_path / "out")]) == 2


def test_fields_that_are_not_used_are_named(tmp_path: Path) -> None:
    FOLDERS["granite"](tmp_path)
    changed(tmp_path, CONFIG, {"strange": 1, "add_bos_token": True, "padding_side": "left"})
    unused, starts, *more = from_path(str(tmp_path)).notes
    assert unused.endswith("left out: strange")
    assert "add_bos_token is true" in starts and "adds none" in starts
    assert not more


@pytest.mark.parametrize("name", FOLDERS)
def test_files_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    folder = FOLDERS[name](tmp_path / "theirs")
    found = from_path(str(folder))
    back = tmp_path / "back"
    back.mkdir()
    (back / "tokenizer.json").write_text(found.text, encoding="utf-8")
    found.files.write(back, found.end_id, None)
    for file in folder.glob("*.json"):
        copy = json.loads((back / file.name).read_text()) if file.name != "config.json" else {}
        before = json.loads(file.read_text())
        if file.name == CONFIG:  # in words of release 4 of transformers
            before = {"model_input_names": ["input_ids", "attention_mask"]} | before
            copy = {"model_input_names": ["input_ids", "attention_mask"]} | copy
            if "additional_special_tokens" not in before and "additional_special_tokens" in copy:
                copy["extra_special_tokens"] = copy.pop("additional_special_tokens")
        if file.name in (CONFIG, "special_tokens_map.json", "added_tokens.json"):
            assert copy == before, file.name
    for file in folder.rglob("*.jinja"):
        assert (back / file.relative_to(folder)).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("chosen", ["tool_use", "default"])
def test_templates_in_files_precede_those_of_the_configuration(tmp_path: Path, chosen: str) -> None:
    folder = FOLDERS["added_tokens"](tmp_path)
    changed(folder, CONFIG, {"chat_template": "{{ 'other' }}"})
    ours, theirs = from_path(str(folder)), AutoTokenizer.from_pretrained(folder)
    tools = chosen == "tool_use"
    assert ours.files.chat_template(tools) == theirs.get_chat_template(
        tools=[{}] if tools else None
    )


OF_MODEL = {"think": "<think>", "tool": {"__type": "AddedToken", **special("<tool>")}}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_specific_special_tokens": OF_MODEL},
        {"model_specific_special_tokens": OF_MODEL, "image_token": "<image>"},
    ],
    ids=["alone", "beside another"],
)
def test_named_tokens_of_release_5_are_recognised(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), eos_token=END_OF_TEXT, **fields)
    ours, theirs = from_path(str(folder)), AutoTokenizer.from_pretrained(folder)
    text = "a <think> b <tool><image>"
    assert ours.encode_prompt(text) == theirs(text)["input_ids"]
    assert ours.notes == ()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with more tokens than transformers asks of Mistral's."""
    folder = write(tmp_path_factory.mktemp("large"), byte_level(), eos_token=END_OF_TEXT)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {f"\ue000{number}": number for number in range(len(vocab), 100_010)}
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("fix", "model", "noted"),
    [
        (None, {"model_type": "mistral"}, True),
        (True, {"model_type": "mistral", "transformers_version": "4.57.3"}, False),
        (True, {"model_type": "mistral", "transformers_version": "5.1.0"}, False),
    ],
    ids=["as it is", "corrected", "right"],
)
def test_words_of_mistral_are_those_of_transformers(
    fix: bool | None, model: dict[str, str], noted: bool, large: Path
) -> None:
    fields = {"eos_token": END_OF_TEXT, "fix_mistral_regex": fix}
    given = {name: value for name, value in fields.items() if value is not None}
    (large / "tokenizer_config.json").write_text(json.dumps(given))
    (large / "config.json").write_text(json.dumps(model))
    ours, theirs = from_path(str(large)), AutoTokenizer.from_pretrained(large)
    text = "CamelCase don't 1234  x\n\n HELLOworld"
    assert ours.encode_prompt(text) == theirs(text)["input_ids"]
    assert any("fix_mistral_regex" in note for note in ours.notes) == noted


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    files = {"tokenizer.model": "x", "vocab.json": "{}"}
    folder = write(tmp_path, byte_level(), eos_token=END_OF_TEXT, files=files)
    (note,) = from_path(str(folder)).notes
    assert "left out: vocab.json, tokenizer.model" in note
