"""Folders that speak: a small tokenizer with special tokens, a chat template, and conversations."""

import json
import random
import re
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
TEMPLATES = Path(__file__).parent / "data/chat_templates"
_BEGIN = "<｜begin▁of▁sentence｜>"
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"special": ("<s>", "[INST]", "[/INST]", "</s>"), "bos_token": "<s>"},
    "qwen3_moe": {"special": ("<|endoftext|>", "<|im_start|>", "<tool_call>", "<|im_end|>")},
    "olmoe": {"special": ("<pad>", "<|endoftext|>"), "bos_token": "<|endoftext|>"},
    "deepseek_v3": {
        "special": (_BEGIN, "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "bos_token": _BEGIN,
    },
    "glm4_moe": {
        "special": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    },
    "gpt_oss": {
        "special": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "generation": {"eos_token_id": [3, 4]},
    },
    "granitemoe": {"special": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")},
    "ernie4_5_moe": {
        "special": ("<|begin_of_sentence|>", "<|end_of_sentence|>"),
        "cls_token": "<|begin_of_sentence|>",
    },
}
"""Special tokens by family, the one that ends a text last, and more of their files."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "load",
            "description": "charge d'un expert 日本",
            "parameters": {"type": "object", "properties": {"expert": {"type": "integer"}}},
        },
    }
]
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


def template_of(family: str, marked: bool = True) -> str:
    """Return a family's template, with or without ``{% generation %}``."""
    text = (TEMPLATES / f"{family}.jinja").read_text()
    if marked:
        return text
    return re.sub(r"{%(-?) *(end)?generation *(-?)%}", r"{%\1 if true \3%}{% endif %}", text)


def drawn_example(draws: random.Random, family: str) -> dict[str, Any]:
    """Return an example of a family: conversations, some with reasoning, some with tools."""
    messages, found = conversation(draws), dict[str, Any]()
    for message in messages:
        # transformers leaves all but the first token of a last letter out of its mask.
        message["content"] += "."
    if family in ("qwen3_moe", "gpt_oss") and draws.random() < 0.4:
        for message in messages:
            if message["role"] == "assistant" and draws.random() < 0.6:
                message["reasoning_content"] = words(draws)
    if family == "qwen3_moe" and draws.random() < 0.4:
        found["tools"] = TOOLS
        call = {"type": "function", "function": {"name": "load", "arguments": {"expert": 3}}}
        messages[-1:] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": words(draws)},
            {"role": "assistant", "content": words(draws) + "."},
        ]
    return {"messages": messages} | found
