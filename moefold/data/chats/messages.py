"""Messages as templates expect them: how nulls, lists of text parts and arguments are passed.

Templates differ in what they take: some test content for null, some walk over parts or arguments,
some concatenate both as text. A :class:`Form` is one such choice; :func:`possible_forms` lists
those that a conversation allows, and :mod:`moefold.data.chats.answers` takes the first with which
the template writes all of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from moefold.data.corpora.records import BadDocument

Message = Mapping[str, Any]
ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates know the first two."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part of content that is text."""
_PART_CONVERSIONS = {
    "thinking": "write its text as reasoning_content of the message",
    "reasoning": "write its text as reasoning_content of the message",
    "refusal": "write it as text",
    "tool_use": "write it as tool_calls of the message",
    "tool_call": "write it as tool_calls of the message",
    "tool_result": "write it as a message with role tool",
}
"""What to do about parts of a message's content that are not text, by their type."""


Parts = Literal["listed", "joined", "wrapped"]
Arguments = Literal["object", "text"]
Nulls = Literal["absent", "null", "empty"]


class Form(NamedTuple):
    """How messages are passed to a template."""

    parts: Parts = "joined"
    """A list of text parts stays one, is joined by newlines, or all text becomes such a list."""
    arguments: Arguments = "object"
    """Arguments of tool calls are objects, or JSON text."""
    nulls: Nulls = "absent"
    """Content that is null, as in answers with tool calls alone, is left out, null, or no text.

    With ``null``, this is also what becomes of empty text beside tool calls.
    """


def possible_forms(messages: Sequence[Message]) -> list[Form]:
    """Return the forms that differ for a conversation, the preferred one first.

    Null is left out first, as ``transformers`` does.
    """
    has_parts = any(isinstance(m.get("content"), list) for m in messages)
    has_calls = any(m.get("tool_calls") for m in messages)
    has_nulls = any(_may_be_null(m) for m in messages)
    parts: list[Parts] = ["listed", "joined", "wrapped"] if has_parts else ["joined", "wrapped"]
    arguments: list[Arguments] = ["object", "text"] if has_calls else ["object"]
    nulls: list[Nulls] = ["absent", "null", "empty"] if has_nulls else ["absent"]
    return [Form(p, a, n) for p in parts for a in arguments for n in nulls]


def apply_form(messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
    """Return messages as a template takes them.

    Nulls are left out, reasoning has both names that templates use, and ``form`` decides the rest.

    Raises:
        BadDocument: if content has a part that is not text, or a tool call is malformed.
    """
    return [_apply(number, message, form) for number, message in enumerate(messages)]


def describe(number: int, message: Message) -> str:
    """Name a message in an error: its position and role."""
    return f"message {number} ({message.get('role')})"


def _may_be_null(message: Message) -> bool:
    content = message.get("content")
    return content is None or (content == "" and bool(message.get("tool_calls")))


def _apply(number: int, message: Message, form: Form) -> dict[str, Any]:
    values = {key: value for key, value in message.items() if value is not None}
    reasoning = next((values[name] for name in REASONING if name in values), None)
    if reasoning is not None:
        values = {"thinking": reasoning} | values | {"reasoning_content": reasoning}
    content = values.get("content")
    if isinstance(content, list):
        values["content"] = _content(texts_of(number, message), form)
    elif isinstance(content, str) and form.parts == "wrapped":
        values["content"] = _content([content], form)
    if _may_be_null(message):
        if form.nulls == "null":
            values["content"] = None
        elif form.nulls == "empty":
            values["content"] = ""
    calls = values.get("tool_calls")
    if calls:
        values["tool_calls"] = _calls(number, message, form)
    return values


def texts_of(number: int, message: Message) -> list[str]:
    """Return the texts of a message's content, which is a list of parts."""
    texts = []
    for position, part in enumerate(message["content"]):
        where = f"part {position} of {describe(number, message)}"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS:
            remedy = _PART_CONVERSIONS.get(str(kind), "remove it")
            detail = f"{where} has type {kind!r}, but only text is read; {remedy}"
            raise BadDocument("a part that is not text", detail)
        if not isinstance(part.get("text"), str):
            raise BadDocument("a part that is not text", f"{where} has no text")
        texts.append(part["text"])
    return texts


def _content(texts: Sequence[str], form: Form) -> str | list[dict[str, str]]:
    if form.parts == "joined":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _calls(number: int, message: Message, form: Form) -> list[dict[str, Any]]:
    """Return a message's tool calls with their arguments in a form."""
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        detail = f"tool_calls of {describe(number, message)} is not a list of objects"
        raise BadDocument("a malformed tool call", detail)
    changed = []
    for position, call in enumerate(calls):
        where = f"call {position} of {describe(number, message)}"
        inner = call.get("function")
        if isinstance(inner, dict):
            changed.append(call | {"function": inner | _arguments(where, inner, form)})
        else:  # some data, and some templates, have no object between
            changed.append(call | _arguments(where, call, form))
    return changed


def _arguments(where: str, function: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return a function's arguments in a form, under their key.

    Text is parsed, as vLLM does; null and empty text are an empty object.
    """
    if "arguments" not in function:
        return {}
    given = function["arguments"]
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            detail = f"arguments of {where} are not JSON: {error}"
            raise BadDocument("a malformed tool call", detail) from error
    else:
        value = given
    if not isinstance(value, dict):
        kind = type(value).__name__
        detail = f"arguments of {where} are not an object, but a {kind}"
        raise BadDocument("a malformed tool call", detail)
    if form.arguments == "object":
        return {"arguments": value}
    text = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    return {"arguments": text}
