"""The token by which a chat template ends answers, which need not be the one that ends documents.

A base model's folder may end texts with ``<|endoftext|>`` and have a template whose answers end
with ``<|im_end|>``. A model trained on such answers stops at the template's token.
"""

from datetime import datetime
from functools import lru_cache

from moefold.data.chats.messages import ASSISTANT
from moefold.data.chats.renderer import Renderer, TemplateText
from moefold.data.corpora.records import BadDocument
from moefold.data.tokenizer import Tokenizer

_QUESTION = "zqv question"
_ANSWER = "zqv answer"
"""Words that no template writes of itself."""
_DAY = datetime(2024, 1, 1)
"""A date for templates that write one."""


def answer_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that a tokenizer's template writes right after a last answer.

    White space before such a token does not count. There is none without a template, if it fails on
    one question and one answer, or if no token follows the answer; there are two if the template
    for conversations with tools ends answers otherwise.

    Raises:
        DataError: if the template's syntax is wrong.
    """
    texts = [tokenizer.files.chat_template(tools) for tools in (False, True)]
    found = [_end_of(text, tokenizer) for text in dict.fromkeys(texts) if text is not None]
    return list(dict.fromkeys(end for end in found if end is not None))


def _end_of(text: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that a template writes right after a last answer, or None."""
    source = tokenizer.template_source or tokenizer.source
    special = tuple(tokenizer.files.special_tokens().items())
    return tokenizer.token_at_start(_text_after_answer(text, special, source).lstrip())


@lru_cache(maxsize=8)
def _text_after_answer(text: str, special: tuple[tuple[str, str], ...], source: str) -> str:
    """Return what a template writes after a last answer; nothing if it fails."""
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": ASSISTANT, "content": _ANSWER},
    ]
    with Renderer(TemplateText(text, dict(special), source, _DAY)) as renderer:
        try:
            written = renderer.text_of(messages)
        except BadDocument:  # it needs more than a question, which conversations have
            return ""
    return written.rpartition(_ANSWER)[2] if _ANSWER in written else ""
