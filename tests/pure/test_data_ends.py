"""What begins and ends a text: as the folder says, once, and where a template says so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from moefold.data.chats.answer_end import answer_ends
from moefold.data.chats.answers import AnswerFinder, TrainedConversation
from moefold.data.chats.conversations import (
    ExampleText,
    _begin_together,
    encode_examples,
    encode_pairs,
)
from moefold.data.chats.template import ChatTemplate
from moefold.data.config import FileTokenizer
from moefold.data.tokenizer import Tokenizer, from_path, from_record
from tests.chats import CHATML, write_chat_folder

LLAMA = ("<pad>", "<s>", "</s>")
PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_with(folder: Path, processor: Any, **config: Any) -> Path:
    """Write a folder of ``<s>`` and ``</s>`` with a post-processor."""
    write_chat_folder(folder, None, LLAMA, bos_token="<s>", **config)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processor
    inner.save(str(folder / "tokenizer.json"))
    return folder


def template(single: str, *tokens: str) -> Any:
    ids = {token: number for number, token in enumerate(LLAMA)}
    return processors.TemplateProcessing(
        single=single, special_tokens=[(token, ids[token]) for token in tokens]
    )


BEGINS = {
    "nothing": (None, [], []),
    "start": (template("<s> $A", "<s>"), [1], []),
    "both": (template("<s> $A </s>", "<s>", "</s>"), [1], [2]),
    "two": (template("<pad> <s> $A", "<pad>", "<s>"), [0, 1], []),
    "bert": (processors.BertProcessing(("</s>", 2), ("<s>", 1)), [1], [2]),
    "sequence": (
        processors.Sequence(
            [processors.ByteLevel(trim_offsets=True), template("<s> $A", "<s>")]  # type: ignore[list-item]
        ),
        [1],
        [],
    ),
}


@pytest.mark.parametrize("name", BEGINS)
def test_the_post_processor_alone_decides_what_begins_a_text(tmp_path: Path, name: str) -> None:
    processor, head, tail = BEGINS[name]
    found = from_path(str(folder_with(tmp_path, processor)))
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "expert gate"
    assert found.encode_prompt(text) == inner.encode(text).ids
    body = found.encode(text)
    (document,) = found.encode_documents([text])
    assert document.tolist() == [*head, *body, 2] == [*head, *body, *(tail or [2])]


def test_no_start_is_taken_from_the_end(tmp_path: Path) -> None:
    write_chat_folder(tmp_path, None, ("<|endoftext|>",))
    found = from_record(FileTokenizer(path=str(tmp_path)), lambda _: iter(()))
    assert found.start is None
    assert found.encode_documents(["a"])[0].tolist() == [*found.encode("a"), 0]


def test_a_start_that_a_run_names_is_added_by_the_file(tmp_path: Path) -> None:
    found = from_path(str(folder_with(tmp_path, None)), start="<s>")
    assert found.encode_prompt("a")[0] == 1
    assert tokenizers.Tokenizer.from_str(found.text).encode("a").ids == found.encode_prompt("a")
    none = Tokenizer(found.text, "</s>", "")
    assert none.head == () and none.encode_prompt("a") == none.encode("a")


@pytest.mark.parametrize("text", ["<s>a</s>", "a</s>", "<s>a", "a"])
def test_no_token_around_a_text_is_written_twice(tmp_path: Path, text: str) -> None:
    folder_with(tmp_path, template("<s> $A </s>", "<s>", "</s>"))
    found = from_path(str(tmp_path))
    wanted = [1, *found.encode("a"), 2]
    assert found.encode_prompt(text) == wanted
    assert found.encode_documents([text])[0].tolist() == wanted


def test_special_tokens_in_documents_are_as_the_folder_says(tmp_path: Path) -> None:
    whole = from_path(str(folder_with(tmp_path / "a", None)))
    split = from_path(str(folder_with(tmp_path / "b", None, split_special_tokens=True)))
    text = "a</s>b"
    assert 2 in whole.encode(text) and 2 in whole.encode_prompt(text)
    assert 2 not in split.encode(text) and 2 not in split.encode_prompt(text)


def test_a_pair_is_one_text_with_labels_from_its_prompt_on(tmp_path: Path) -> None:
    found = from_path(str(folder_with(tmp_path, template("<s> $A", "<s>"))))
    merged = "expe", "rt</s>"
    ((ids, mask),) = encode_pairs([merged], found)
    assert ids.tolist() == found.encode_prompt("expert</s>")
    prompt = found.encode_prompt("expe")
    first = int(mask.argmax())
    assert mask.tolist() == [False] * first + [True] * (len(ids) - first)
    assert ids[:first].tolist() == prompt[:first] and (
        first == len(prompt) or ids[first] != prompt[first]
    )


ENDS = {
    "chatml": (PLAIN_CHATML, "<|im_end|>"),
    "end of text": ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", None),
    "two": (
        "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}<|endoftext|>",
        "<|im_end|>",
    ),
    "after a space": (
        "{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}",
        "<|im_end|>",
    ),
    "id 0": ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", "<|endoftext|>"),
    "nothing": ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ""),
    "a system is required": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}",
        "",
    ),
    "no answer": ("{% for m in messages %}{{ m.role }}{% endfor %}", ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_answers_is_what_the_template_writes_after_one(
    tmp_path: Path, name: str
) -> None:
    text, token = ENDS[name]
    folder = write_chat_folder(tmp_path, text, generation={"eos_token_id": 0})
    found = from_path(str(folder))
    token = found.end if token is None else token
    wanted = tokenizers.Tokenizer.from_str(found.text).token_to_id(token) if token else None
    assert answer_ends(found) == ([] if wanted is None else [wanted])


CALLS = (
    "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<|pad|>{{ c.function.arguments | tojson }}CLOSE{% endfor %}AFTER"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("close", "after", "ends"),
    [
        ("", "<|call|>", ["<|im_end|>", "<|call|>"]),
        ("<|pad|>", " <|call|>\n", ["<|im_end|>", "<|call|>"]),
        ("<|pad|>", "<|im_end|>\n", ["<|im_end|>"]),
        ("", "", ["<|im_end|>"]),
    ],
)
def test_a_call_may_end_with_a_token_of_its_own(
    tmp_path: Path, close: str, after: str, ends: list[str]
) -> None:
    text = CALLS.replace("CLOSE", close).replace("AFTER", after)
    tokens = ("<|endoftext|>", "<|im_start|>", "<|pad|>", "<|call|>", "<|im_end|>")
    found = from_path(str(write_chat_folder(tmp_path, text, tokens)))
    inner = tokenizers.Tokenizer.from_str(found.text)
    wanted = [inner.token_to_id(end) for end in ends]
    assert answer_ends(found) == wanted


def labels(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation's labels."""
    shape = ChatTemplate(tokenizer.files["chat_template.jinja"], {})
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    (rendered,) = AnswerFinder(shape).examples_of(TrainedConversation(messages, answers))
    ((ids, mask),) = encode_examples([ExampleText(rendered)], tokenizer)
    return tokenizer.decode(ids[mask].tolist(), special=True)


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
def test_what_a_template_writes_after_its_end_is_no_label(tmp_path: Path, eos: str) -> None:
    found = from_path(str(write_chat_folder(tmp_path, PLAIN_CHATML, eos_token=eos)))
    assert labels(found, TALK * 2) == "b<|im_end|>" * 2
    closing = PLAIN_CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}")
    found.files["chat_template.jinja"] = closing
    assert labels(found, TALK) == "b<|im_end|>"


@pytest.mark.parametrize("answer", ["a  b", "ab ", "ab  ", " a", "  ", "日 ", "où 🙂 "])
@pytest.mark.parametrize("processor", ["byte level", "roberta"])
def test_offsets_that_are_trimmed_cost_no_label(
    tmp_path: Path, answer: str, processor: str
) -> None:
    marked = CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    texts = []
    for trims in (False, True):
        folder = write_chat_folder(tmp_path / str(trims), marked)
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if trims and processor == "byte level":
            inner.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[assignment]
        elif trims:
            inner.post_processor = processors.RobertaProcessing(  # type: ignore[assignment]
                ("<|im_end|>", 2), ("<|im_start|>", 1), trim_offsets=True
            )
        inner.save(str(folder / "tokenizer.json"))
        talk = [TALK[0], {"role": "assistant", "content": answer}]
        texts.append(labels(from_path(str(folder)), talk))
    assert texts == [answer, answer]


def test_masks_of_a_pair_begin_together() -> None:
    masks = [np.array([False, True, True]), np.array([False, False, True, True])]
    wanted = [[False, True, True], [False, True, True, True]]
    assert [mask.tolist() for mask in _begin_together(masks)] == wanted


def test_settings_of_generation_list_the_new_end_once(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, generation={"eos_token_id": 0, "top_k": 3})
    found = from_path(str(folder), end="<|endoftext|>")
    for _ in range(2):
        found.add_ends([2])
    assert json.loads(found.files["generation_config.json"]) == {"eos_token_id": [0, 2], "top_k": 3}
    assert found.end_ids == (0, 2)
