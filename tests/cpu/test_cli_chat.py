"""``sample --chat`` and ``chat``: answers in the template, as transformers writes them."""

import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from moefold.cli import chat
from moefold.cli.main import main
from moefold.data.tokenizer import from_path
from moefold.training import text_generator
from moefold.training.formatting import escape_control
from moefold.training.generation_settings import TEMPERATURE, TOP_P
from moefold.training.text_generator import TextGenerator
from tests.chats import CHATML, FAMILIES, bpe, template_of, write_chat_folder
from tests.cpu.families import reference
from tests.family_draws import draw

PROMPTS = ("the gate", "load où 🙂", "router", "expert token")
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with drawn weights, which ends some answers early."""
    path = tmp_path_factory.mktemp("chat") / "model"
    # No row without a token: transformers would draw it, and it has no text.
    config = draw("qwen3_moe", Random("speak")) | {"vocab_size": bpe().get_vocab_size()}
    config |= {"max_position_embeddings": 512, "tie_word_embeddings": False}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    model = reference("qwen3_moe", config, 11)
    with torch.no_grad():  # some tokens end a text often
        model.lm_head.weight[[0, 2]] *= 2.5
    model.save_pretrained(path)
    generation = {"eos_token_id": [2, 0], "do_sample": False}
    return write_chat_folder(path, CHATML, generation=generation)


def theirs(folder: Path, messages: list[dict[str, Any]]) -> str:
    """What transformers answers, the likeliest token each time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_answers_are_those_of_transformers_and_stop_at_any_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several prompts in one pass, each as alone; settings are those of the folder."""
    flags = [word for text in PROMPTS for word in ("--prompt", text)]
    command = ["sample", str(folder), "--chat", "--tokens", str(TOKENS), "--json", *flags]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)["samples"]
    assert [s["text"] for s in said] == [theirs(folder, [asked(text)]) for text in PROMPTS]
    assert {s["tokens"] < TOKENS for s in said} == {True, False}
    system = {"role": "system", "content": "fold"}
    assert main([*command, "--system", "fold"]) == 0
    said = json.loads(capsys.readouterr().out)["samples"]
    assert said[0]["text"] == theirs(folder, [system, asked(PROMPTS[0])])


def test_a_conversation_goes_on_from_what_was_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [PROMPTS[0], PROMPTS[1], "/new", PROMPTS[1]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(folder), "--tokens", str(TOKENS)]) == 0
    messages: list[dict[str, Any]] = []
    expected = []
    for line in lines[:2]:
        messages.append(asked(line))
        expected.append(theirs(folder, messages))
        messages.append({"role": "assistant", "content": expected[-1]})
    expected.append(theirs(folder, [asked(PROMPTS[1])]))
    out = capsys.readouterr().out
    assert out.endswith("> \n"), "and the shell's prompt begins a line"
    shown = [part.removesuffix("\n") for part in out.split("> ")[1:-1]]
    speaker = TextGenerator.open(folder)
    for text, found in zip(expected, [shown[0], shown[1], shown[3]], strict=True):
        assert found == escape_control(text)
    pieces = [piece.text for piece in speaker.stream_reply([asked(PROMPTS[0])], TOKENS)]
    assert "".join(pieces) == expected[0] and len(pieces) > 2


def test_settings_of_null_are_as_usual(folder: Path, tmp_path: Path) -> None:
    """They stand in folders whose authors took them away: sampling ended in an error."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    usual = {"temperature": TEMPERATURE, "top_k": None, "top_p": TOP_P}
    (tmp_path / "generation_config.json").write_text(json.dumps(dict.fromkeys(usual)))
    assert usual.items() <= TextGenerator.open(tmp_path).settings().options.items()


def test_what_cannot_speak_is_told(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["sample", str(folder), "--system", "x"]) == 2
    assert "--chat" in capsys.readouterr().err
    assert main(["sample", str(tmp_path), "--chat"]) == 2
    assert "not a checkpoint" in capsys.readouterr().err
    for flags in (["--top-k", "0"], ["--tokens", "0"], ["--top-p", "2"]):
        assert main(["chat", str(folder), *flags]) == 2
    mute = tmp_path / "mute"
    mute.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (mute / file.name).write_bytes(file.read_bytes())
    capsys.readouterr()
    assert main(["sample", str(mute), "--chat", "--prompt", "a"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "reply", "shown", "again"),
    [
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>load it<|end|><|start|>assistant<|channel|>final"
            "<|message|>the gate",
            "[reasoning] load it\n[answer] the gate",
            "<|start|>assistant<|channel|>final<|message|>the gate",
        ),
        (
            "qwen3_moe",
            "<think>\nload it\n</think>\n\nthe gate",
            "[reasoning] \nload it\n\n[answer] the gate",
            "<|im_start|>assistant\nthe gate<|im_end|>",
        ),
        ("mixtral", "the gate", "the gate", " the gate</s>"),
    ],
)
def test_reasoning_is_marked_and_goes_back_as_the_template_wants(
    family: str,
    reply: str,
    shown: str,
    again: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = from_path(str(write_chat_folder(tmp_path, template_of(family), **FAMILIES[family])))
    generator = TextGenerator(tmp_path, None, tokenizer, None)  # type: ignore[arg-type]
    prompts = list[str]()

    def scripted(decoder: Any, ids: list[list[int]], *rest: Any, **how: Any) -> Any:
        prompts.append(tokenizer.decode(ids[0], special=True))
        ((new, _),) = tokenizer.encode_chats([reply])
        return ({0: i} for i in new.tolist())

    monkeypatch.setattr(text_generator, "stream_tokens", scripted)
    monkeypatch.setattr(text_generator, "IncrementalDecoder", lambda model: None)
    monkeypatch.setattr(TextGenerator, "open", lambda *_: generator)
    monkeypatch.setattr(chat, "check_options", lambda args: tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("router\nexpert\n"))
    assert main(["chat", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"> {shown}\n> {shown}\n> \n"
    assert again in prompts[1] and "load it" not in prompts[1]
