"""Generated replies: which part is reasoning, which the answer, and the message of both.

Models write reasoning between tags such as ``<think>`` and ``</think>``, or in channels (gpt-oss):
``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``. Which
form a model has is known by its chat template.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moefold.data.chats.messages import ASSISTANT

ANSWER = "answer"
REASONING = "reasoning"
TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
)
"""Texts before and after reasoning."""
CHANNEL = "<|channel|>"
_MARKS = ("<|start|>", CHANNEL, "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_CHANNELS = {"final": ANSWER, "analysis": REASONING}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")


class Piece(NamedTuple):
    """A part of a reply."""

    kind: str
    """``answer``, ``reasoning``, or the name of another channel."""
    text: str


@dataclass(frozen=True)
class ReplyForm:
    """How replies to a prompt are divided.

    Args:
        template: text of the chat template.
        prompt: the rendered conversation up to the reply.
        special: texts of special tokens, which are no part of a reply.
    """

    template: str
    prompt: str
    special: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether replies can have other parts than an answer."""
        return CHANNEL in self.template or self._tags is not None

    @property
    def _tags(self) -> tuple[str, str] | None:
        return next((tags for tags in TAGS if tags[1] in self.template), None)

    def split(self, text: str, ended: bool = True) -> list[Piece]:
        """Return the parts of a reply, decoded with special tokens.

        Unless it has ``ended``, what may be the beginning of a mark is left out.
        """
        text = _without_tail(text, self.special, ended)
        if CHANNEL in self.template:
            pieces = _split_channels(_without_tail(text, _MARKS, ended))
        elif (tags := self._tags) is not None:
            pieces = self._split_tags(text, tags, ended)
        else:
            pieces = [Piece(ANSWER, text)]
        kept = [Piece(kind, self._without_special(text)) for kind, text in pieces]
        return [piece for piece in kept if piece.text]

    def _split_tags(self, text: str, tags: tuple[str, str], ended: bool) -> list[Piece]:
        begin, end = tags
        if not self.prompt.rstrip().endswith(begin):
            start = text.lstrip()
            if not start.startswith(begin):
                waits = not ended and begin.startswith(start)
                return [] if waits else [Piece(ANSWER, text)]
            text = start.removeprefix(begin)
        reasoning, found, answer = text.partition(end)
        if not found:
            return [Piece(REASONING, _without_tail(text, (end,), ended))]
        return [Piece(REASONING, reasoning), Piece(ANSWER, answer.lstrip("\n"))]

    def _without_special(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text

    def message(self, text: str) -> dict[str, Any]:
        """Return a reply as a message, with its reasoning where the template looks for it."""
        pieces = self.split(text)
        reasoning = "".join(piece.text for piece in pieces if piece.kind == REASONING)
        answer = "".join(piece.text for piece in pieces if piece.kind == ANSWER)
        field = next((n for n in ("reasoning_content", "thinking") if self._reads(n)), None)
        tags = self._tags
        if reasoning and field:
            return {"role": ASSISTANT, "content": answer, field: reasoning.strip("\n")}
        if reasoning and tags and CHANNEL not in self.template:
            # Such templates cut the reasoning out of the content themselves.
            answer = f"{tags[0]}{reasoning}{tags[1]}\n\n{answer}"
        return {"role": ASSISTANT, "content": answer}

    def _reads(self, field: str) -> bool:
        return re.search(rf"\b{field}\b", self.template) is not None


def _without_tail(text: str, marks: Sequence[str], ended: bool) -> str:
    """Return a text without an end that may be the beginning of a mark, unless it has ended."""
    if ended:
        return text
    beginnings = [mark[:n] for mark in marks for n in range(1, len(mark))]
    held_back = max((len(begin) for begin in beginnings if text.endswith(begin)), default=0)
    return text[: len(text) - held_back]


def _split_channels(text: str) -> list[Piece]:
    """Return what each channel of a reply has, in order."""
    pieces = list[Piece]()
    channel = "final"
    header = ""
    for part in _SPLIT.split(text):
        if part in ("<|start|>", CHANNEL):
            header = part
        elif part in _MARKS:
            channel = channel if part == "<|message|>" else "final"
            header = ""
        elif header == CHANNEL:
            channel = (part.split() or ["final"])[0]
        elif part and not header:  # a role follows <|start|>
            pieces.append(Piece(_CHANNELS.get(channel, channel), part))
    return pieces
