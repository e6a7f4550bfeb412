"""Generation settings give the next-token distributions that transformers' processors give."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.cli.main import main
from moefold.data.config import DataError
from moefold.data.tokenizer import from_path
from moefold.model.generate import candidates_of, stream_tokens
from moefold.model.logits import LogitRules
from moefold.model.truncation import Truncation
from moefold.training.generation_settings import TEMPERATURE, TOP_P, generation_settings
from moefold.training.text_generator import TextGenerator
from tests.chats import bpe, write_chat_folder
from tests.cpu.families import reference
from tests.family_draws import draw

VOCAB, END, TOKENS = 24, 3, 6


def theirs(config: dict[str, Any], texts: list[list[int]], prompt: int, logits: Tensor) -> Tensor:
    """Logits after the processors of transformers, of texts of one length."""
    from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

    wanted = GenerationConfig(eos_token_id=END, **config)
    wanted.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    wanted.max_length = prompt + TOKENS
    wanted._eos_token_tensor = torch.tensor([END])
    config_of = {"config": SimpleNamespace(is_encoder_decoder=False)}
    stub = type("Stub", (GenerationMixin,), {"__init__": lambda self: None} | config_of)()
    processors = stub._get_logits_processor(
        wanted,
        input_ids_seq_length=prompt,
        logits_processor=LogitsProcessorList(),
        device="cpu",
    )
    return processors(torch.tensor(texts), logits.clone())


def ours(config: dict[str, Any], texts: list[list[int]], prompt: int, logits: Tensor) -> Tensor:
    """Logits after the rules, and what is sampled from, as in ``stream_tokens``."""
    options = generation_settings(config, {}, [END]).options
    rules = options.get("rules", LogitRules())
    rows = zip(texts, logits, strict=True)
    changed = torch.stack([rules.apply(r, t, len(t) - prompt, TOKENS, [END]) for t, r in rows])
    if options["temperature"] == 0:
        return changed
    how = [options[name] for name in ("top_k", "top_p", "min_p")]
    truncation = options.get("truncation", Truncation())
    probability, ids = candidates_of(changed / options["temperature"], *how, truncation)
    probability = (
        probability if ids is None else torch.zeros_like(changed).scatter(1, ids, probability)
    )
    return probability.log()


CONFIGS: list[dict[str, Any]] = [
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "repetition_penalty": 0.7, "temperature": 0.5},
    {"do_sample": False, "no_repeat_ngram_size": 1},
    {"do_sample": False, "no_repeat_ngram_size": 2},
    {"do_sample": False, "no_repeat_ngram_size": 3},
    {"do_sample": False, "suppress_tokens": [1, 5, 7]},
    {"do_sample": False, "begin_suppress_tokens": [2, 4]},
    {"do_sample": False, "bad_words_ids": [[5], [1, 2], [0, 1, 4], [END]]},
    {"do_sample": False, "sequence_bias": [[[6], 2.5], [[1, 2], -4.0]]},
    {"do_sample": False, "exponential_decay_length_penalty": [2, 1.5]},
    {"do_sample": True, "top_h": 0.4, "temperature": 1.5, "top_k": 0},
    {"do_sample": True, "typical_p": 0.5, "temperature": 0.8},
    {"do_sample": True, "epsilon_cutoff": 0.08},
    {"do_sample": True, "eta_cutoff": 0.3, "top_k": 0},
    {
        "do_sample": True,
        "top_h": 0.9,
        "top_p": 0.9,
        "typical_p": 0.8,
        "epsilon_cutoff": 0.02,
        "eta_cutoff": 0.1,
    },
    {"do_sample": False, "min_length": 7},
    {"do_sample": False, "min_new_tokens": 3},
    {"do_sample": False, "forced_bos_token_id": 9, "begin_suppress_tokens": [9, 1]},
    {"do_sample": False, "forced_eos_token_id": END},
    {"do_sample": False, "forced_eos_token_id": [END, 8]},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 0},
    {"do_sample": True, "temperature": 1.7, "top_k": 5, "top_p": 0.9},
    {"do_sample": True, "min_p": 0.2},
    {"do_sample": True, "min_p": 0.1, "top_p": 0.6, "top_k": 9, "temperature": 0.7},
    {
        "do_sample": True,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "top_k": 8,
        "bad_words_ids": [[3, 4]],
        "suppress_tokens": [0],
        "sequence_bias": [[[2], 1.0]],
    },
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(c))
def test_distributions_are_those_of_transformers(config: dict[str, Any]) -> None:
    draws, torch_draws = Random(str(config)), torch.Generator().manual_seed(5)
    for prompt in (1, 4):
        for new in range(TOKENS):
            texts = [[draws.randrange(5) for _ in range(prompt + new)] for _ in range(8)]
            logits = 2 * torch.randn(8, VOCAB, generator=torch_draws, dtype=torch.float64)
            expected = theirs(config, texts, prompt, logits)
            found = ours(config, texts, prompt, logits)
            torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
            assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_what_is_sampled_obeys_min_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double().log()
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    for min_p, most in ((0.0, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        drawn = {
            t
            for new in stream_tokens(lambda _: logits, [[0]], 300, min_p=min_p, **how)
            for t in new.values()
        }
        assert len(drawn) == most
    with pytest.raises(ValueError, match="min_p 2"):
        list(stream_tokens(lambda _: logits, [[0]], 3, min_p=2, **how))


@pytest.mark.parametrize(
    ("stored", "flags", "options"),
    [
        ({}, {}, {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": None}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": None}, {}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {}, {"temperature": 0}),
        ({"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": TOP_P}),
        ({"top_k": 20, "temperature": 0.6}, {}, {"temperature": 0.6, "top_k": 20, "top_p": 1.0}),
        ({"do_sample": True, "min_p": 0.1}, {"min_p": 0.3}, {"min_p": 0.3}),
        ({"top_k": 0}, {}, {"top_k": None}),
        (
            {"repetition_penalty": 1.2},
            {"repetition_penalty": 1.5},
            {"rules": LogitRules(repetition_penalty=1.5)},
        ),
    ],
)
def test_settings_of_a_folder_and_flags(stored: Any, flags: Any, options: Any) -> None:
    found = generation_settings(stored, flags).options
    assert options.items() <= found.items()
    assert "rules" in options or "rules" not in found


def test_settings_are_said_and_those_left_out_named() -> None:
    stored = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "max_new_tokens": 7,
        "num_beams": 4,
        "typical_p": 1.0,
        "stop_strings": ["x"],
        "use_cache": True,
        "_from_model_config": True,
        "early_stopping": False,
        "eos_token_id": 3,
        "transformers_version": "5.24.0",
    }
    settings = generation_settings(stored, {"top_p": 0.5})
    assert settings.tokens == 7
    assert settings.notes() == [
        "generation_config.json: temperature 0.6, do_sample True, max_new_tokens 7",
        "generation_config.json (not obeyed): num_beams 4, stop_strings ['x']",
    ]
    assert generation_settings({"eos_token_id": 2, "pad_token_id": 0}, {}).notes() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", -1),
        ("top_h", 0),
        ("typical_p", 1.5),
        ("eta_cutoff", 1),
        ("exponential_decay_length_penalty", [3, -1.0]),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("do_sample", "yes"),
        ("max_new_tokens", 0),
        ("repetition_penalty", 0),
        ("suppress_tokens", 3),
        ("suppress_tokens", [-1]),
        ("bad_words_ids", [3]),
        ("bad_words_ids", [[]]),
        ("sequence_bias", [[[1], "x"]]),
        ("forced_eos_token_id", "</s>"),
        ("no_repeat_ngram_size", True),
    ],
)
def test_settings_that_are_malformed_are_refused(name: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"generation_config.json: {name} is .*must be .*correct"):
        generation_settings({name: value}, {})


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if deep is defined and not deep %}"
    "<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "model"
    config = draw("qwen3_moe", Random("speak")) | {"vocab_size": bpe().get_vocab_size()}
    config |= {"max_position_embeddings": 512, "tie_word_embeddings": False}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    reference("qwen3_moe", config, 11).save_pretrained(path)
    generation = {
        "do_sample": False,
        "eos_token_id": 2,
        "repetition_penalty": 1.4,
        "max_new_tokens": 16,
        "suppress_tokens": [5, 40, 41],
        "begin_suppress_tokens": [60],
        "no_repeat_ngram_size": 2,
        "num_beams": 1,
        "max_time": 60.0,
    }
    return write_chat_folder(path, TEMPLATE, generation=generation)


def sampled(folder: Path, capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["sample", str(folder), "--chat", "--prompt", "the gate", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_sample_writes_what_generate_writes(folder: Path, capsys: Any) -> None:
    """With every setting of the folder, and with a value of the template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    texts = set()
    for words, values in (((), {}), (("--template-value", "deep=false"), {"deep": False})):
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": "the gate"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **values,
        )
        said = model.generate(**given, pad_token_id=0)
        text = tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        found = sampled(folder, capsys, *words)
        assert found["samples"][0]["text"] == text
        assert found["notes"][-1] == "generation_config.json (not obeyed): max_time 60.0"
        assert "repetition_penalty 1.4" in found["notes"][-2]
        texts.add(text)
    assert len(texts) == 2
    more = sampled(folder, capsys, "--repetition-penalty", "1.01", "--tokens", "20")
    assert more["samples"][0]["text"] not in texts


def test_values_of_the_training_data_are_the_default(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template_kwargs.json").write_text('{"deep": false}')
    plain, flagged = (sampled(folder, capsys, *w) for w in ((), ("--template-value", "deep=false")))
    assert plain["samples"] != flagged["samples"] == sampled(tmp_path, capsys)["samples"]
    assert sampled(tmp_path, capsys, "--template-value", "deep=true")["samples"] == plain["samples"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--template-value", "deeper=1"),
            "has deeper, which the template does not read; it reads deep",
        ),
        (("--template-value", "deep"), "must be NAME=VALUE"),
        (("--template-value", "deep=False"), "must be false"),
        (("--min-p", "2"), "--min-p 2.0: must be at least 0 and at most 1"),
        (("--repetition-penalty", "0"), "--repetition-penalty 0.0: must be above 0"),
    ],
)
def test_flags_that_are_wrong_are_refused(folder: Path, capsys: Any, words: Any, told: str) -> None:
    for command in (["sample", str(folder), "--chat"], ["chat", str(folder)]):
        assert main([*command, *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["sample", str(folder), "--template-value", "deep=1"]) == 2
    assert "add --chat" in capsys.readouterr().err


def test_values_are_checked_before_a_checkpoint_is_loaded(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["import", str(folder), str(tmp_path / "stored")]) == 0
    monkeypatch.setattr(TextGenerator, "open", lambda *_: pytest.fail("loaded"))
    flags = ["--chat", "--template-value", "deeper=1"]
    assert main(["sample", str(tmp_path / "stored"), *flags]) == 2
    assert "the template does not read; it reads deep" in capsys.readouterr().err


def test_a_template_that_refuses_a_message_is_quoted(tmp_path: Path, capsys: Any) -> None:
    """Which it says of conversations that are typed, too, in its own words."""
    template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}x"
    tokenizer = from_path(str(write_chat_folder(tmp_path, template)))
    generator = TextGenerator(tmp_path, None, tokenizer, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"^{tmp_path}: the template fails: no system here"):
        generator.render_chat([{"role": "system", "content": "a"}])
