"""The tokens by which a chat template ends answers, which need not be those that end documents.

A base model's folder may end texts with ``<|endoftext|>`` and have a template whose answers end
with ``<|im_end|>``. A model trained on such answers stops at the template's token. An answer that
is a tool call may end with a token of its own, at which the program that runs the tool takes over.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from moefold.data.chats.messages import ASSISTANT
from moefold.data.chats.renderer import Renderer, TemplateText
from moefold.data.corpora.records import BadDocument
from moefold.data.tokenizer import Tokenizer

_QUESTION = "zqv question"
_ANSWER = "zqv answer"
_CALLED = "zqv_called"
"""Words that no template writes of itself."""
_DAY = datetime(2024, 1, 1)
"""A date for templates that write one."""


_TOOL = {
    "type": "function",
    "function": {
        "name": _CALLED,
        "description": _CALLED,
        "parameters": {"type": "object", "properties": {_CALLED: {"type": "string"}}},
    },
}
_CALL = {
    "id": "abcdefghi",  # some templates want nine letters
    "type": "function",
    "function": {"name": _CALLED, "arguments": {_CALLED: _ANSWER}},
}


def answer_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that a tokenizer's template writes right after a last answer.

    White space before such a token does not count. There is none without a template, if it fails on
    one question and one answer, or if no token follows the answer. There are more if a tool call
    ends otherwise (with the last special token after it), or if the template for conversations with
    tools is another one.

    Raises:
        DataError: if the template's syntax is wrong.
    """
    texts = [tokenizer.files.chat_template(tools) for tools in (False, True)]
    found = [_ends_of(text, tokenizer) for text in dict.fromkeys(texts) if text is not None]
    return list(dict.fromkeys(end for ends in found for end in ends))


def _ends_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end a text's answers: of text, and of calls if it differs.

    A call's own end follows only where the end of text does not: after a call there are often
    tokens that close the call before the one that ends the answer.
    """
    source = tokenizer.template_source or tokenizer.source
    special = tuple(tokenizer.files.special_tokens().items())
    said, called = _texts_after(text, special, source)
    end = tokenizer.token_at_start(said.lstrip())
    if end is None:
        return []
    closing = tokenizer.special_ids_in(called)
    return [end, closing[-1]] if closing and end not in closing else [end]


@lru_cache(maxsize=8)
def _texts_after(text: str, special: tuple[tuple[str, str], ...], source: str) -> tuple[str, str]:
    """Return what a template writes after a last answer that is text, and after one that is a call.

    Nothing where it fails, or leaves the answer out.
    """
    with Renderer(TemplateText(text, dict(special), source, _DAY)) as renderer:
        said = _text_after(renderer, {"role": ASSISTANT, "content": _ANSWER})
        called = {"role": ASSISTANT, "content": None, "tool_calls": [_CALL]}
        return said, _text_after(renderer, called, [_TOOL])


def _text_after(
    renderer: Renderer, answer: Mapping[str, Any], tools: list[dict[str, Any]] | None = None
) -> str:
    question = {"role": "user", "content": _QUESTION}
    try:
        written = renderer.text_of([question, answer], tools)
    except BadDocument:  # it needs more than a question, which conversations have
        return ""
    return written.rpartition(_ANSWER)[2] if _ANSWER in written else ""
