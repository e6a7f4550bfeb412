"""Folders that speak: a small tokenizer with special tokens, a chat template, and conversations."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

WORDS = ["expert", "token", "router", "load", "gate", "layer", "où", "日本", "🙂", "naïve"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bpe(special: tuple[str, ...] = CHATML_TOKENS, vocab: int = 330) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of the words above, special tokens first."""
    inner = tokenizers.Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return inner


def write_chat_folder(
    folder: Path,
    template: str | None = CHATML,
    special: tuple[str, ...] = CHATML_TOKENS,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a tokenizer's files; ``config`` goes into ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe(special).save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1]} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def words(draws: random.Random, most: int = 8) -> str:
    """Return some drawn words."""
    return " ".join(draws.choices(WORDS, k=draws.randint(1, most)))


def conversation(draws: random.Random, turns: int = 3, system: bool = True) -> list[dict[str, Any]]:
    """Return drawn messages: perhaps a system's, then so many questions and answers at most."""
    found = []
    if system and draws.random() < 0.5:
        found.append({"role": "system", "content": words(draws)})
    for _ in range(draws.randint(1, turns)):
        found.append({"role": "user", "content": words(draws)})
        found.append({"role": "assistant", "content": words(draws)})
    return found
