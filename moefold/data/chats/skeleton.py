"""Sentinels in place of the parts of a conversation, to find them again in a rendered text.

A conversation's *shape* is the conversation with a unique sentinel for each text, number and name.
Rendered once, it shows where a template writes each part; the text of any conversation of that
shape must then be the shape's text with the parts filled in (:class:`Skeleton`). Where it is not,
the template looks into the parts; then words of the real texts are marked (:func:`mark_words`).
"""

import html
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from moefold.data.chats.messages import REASONING, describe

_SENTINEL = re.compile(r"Vqz(\d+)zqV|8111(\d{6})(?:\.5)?")
"""Text and numbers that stand for a part; templates and their JSON leave both unchanged."""
_FIRST_NUMBER = 8_111_000_000
_AROUND = len("VqzzqV")
_SHORTEST = _AROUND + 3
"""Identifiers below this length have no room for a sentinel of their length, and stay."""
_WORD = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|(\w+)")
"""A word, outside of tags such as ``</think>``, at which templates split text."""
_TEXT_FIELDS = ("role", "content", *REASONING)
_MARK = re.compile(r"Wqz(\d+)_(\d+)zqW")


REQUIRED = ("text", "reasoning", "call", "schema")
"""Kinds of parts that must not be lost; not so other fields, and ids that link messages."""


Value = str | int | float
"""Text or a number of a conversation."""


class Part(NamedTuple):
    """A part of a conversation that a template can write."""

    value: Value
    name: str
    """What it is, for messages: "the text of message 0 (user)"."""
    message: int
    """Index of its message; -1 for tools."""
    kind: Literal["text", "reasoning", "call", "schema", "other", "id"]
    """Which part it is; a template must write those of :data:`REQUIRED` kinds."""


class Faked(NamedTuple):
    """A conversation with parts replaced, and the parts."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    parts: list[Part]

    def key(self) -> str:
        """Return a text that is equal for conversations of equal shape."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False, default=str)


Replace = Callable[[int, Part], Any]
"""Returns what takes the place of a part, given its index."""


def sentinel(index: int, part: Part) -> Any:
    """Return a sentinel: text of the length of an identifier, or else as short as possible."""
    if isinstance(part.value, str):
        width = len(part.value) - _AROUND if part.kind == "id" else 6
        return f"Vqz{index:0{width}d}zqV"
    number = _FIRST_NUMBER + index
    return number + 0.5 if isinstance(part.value, float) else number


def chosen_sentinels(chosen: Container[int]) -> Replace:
    """Return a function that replaces only the chosen parts by sentinels."""
    return lambda index, part: sentinel(index, part) if index in chosen else part.value


def mark_words(index: int, part: Part) -> Any:
    """Return a text or reasoning with a mark after each word; other parts are unchanged."""
    if part.kind not in ("text", "reasoning") or not isinstance(part.value, str):
        return part.value
    words = 0

    def mark(found: re.Match[str]) -> str:
        nonlocal words
        if not found[1]:  # a tag
            return found[0]
        words += 1
        return f"{found[0]}Wqz{index}_{words}zqW"

    return _WORD.sub(mark, part.value)


class _Walk:
    """Replaces the parts of a conversation, in their order."""

    def __init__(self, replace: Replace) -> None:
        self.parts: list[Part] = []
        self._replace = replace
        self._ids: dict[str, str] = {}

    def part(self, part: Part) -> Any:
        """Return the replacement of a part."""
        self.parts.append(part)
        return self._replace(len(self.parts) - 1, part)

    def text(self, value: str, name: str, message: int, kind: Any) -> str:
        """Return the replacement of a text; blank text stays."""
        return self.part(Part(value, name, message, kind)) if value.strip() else value

    def identifier(self, value: str, message: int) -> str:
        """Return a replacement that is equal for equal identifiers; short ones stay."""
        if len(value) < _SHORTEST:
            return value
        if value not in self._ids:
            self._ids[value] = self.part(Part(value, "an identifier", message, "id"))
        return self._ids[value]

    def value(self, value: Any, name: str, message: int, kind: Any) -> Any:
        """Return a value with its texts, numbers and keys replaced."""
        if isinstance(value, str):
            return self.text(value, name, message, kind)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.part(Part(value, name, message, kind))
        if isinstance(value, list):
            return [self.value(each, name, message, kind) for each in value]
        if isinstance(value, dict):
            keys = self.keys(value, f"in {name}", message, kind)
            return {keys[k]: self.value(v, name, message, kind) for k, v in value.items()}
        return value

    def keys(self, values: Mapping[str, Any], where: str, message: int, kind: Any) -> dict:
        """Return the replacements of an object's keys, in the keys' order, as some are sorted."""
        return {k: self.text(k, f"the key {k!r} {where}", message, kind) for k in sorted(values)}

    def message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with its parts replaced."""
        found = dict[str, Any]()
        where = describe(number, message)
        reasoning: dict[str, str] = {}
        for key, value in message.items():
            if key == "role":
                found[key] = value
            elif key in REASONING and isinstance(value, str):  # one text, under several names
                if value not in reasoning:
                    name = f"the reasoning of {where}"
                    reasoning[value] = self.text(value, name, number, "reasoning")
                found[key] = reasoning[value]
            elif key == "content" and isinstance(value, list):
                texts = [part["text"] for part in value]
                names = [f"part {i} of {where}" for i in range(len(texts))]
                found[key] = [
                    part | {"text": self.text(text, name, number, "text")}
                    for part, text, name in zip(value, texts, names, strict=True)
                ]
            elif key == "content":
                found[key] = self.value(value, f"the text of {where}", number, "text")
            elif key == "tool_calls" and isinstance(value, list):
                calls = enumerate(value)
                found[key] = [self.call(number, c, f"call {i} of {where}") for i, c in calls]
            elif key in ("tool_call_id", "id") and isinstance(value, str):
                found[key] = self.identifier(value, number)
            else:
                found[key] = self.value(value, f"{key} of {where}", number, "other")
        return found

    def call(self, number: int, call: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a tool call with its parts replaced."""
        found = dict[str, Any]()
        for key, value in call.items():
            if key == "function" and isinstance(value, dict):
                found[key] = self.call(number, value, where)
            elif key == "name" and isinstance(value, str):
                found[key] = self.text(value, f"the name of {where}", number, "call")
            elif key == "arguments":
                found[key] = self.value(value, f"the arguments of {where}", number, "call")
            elif key == "id" and isinstance(value, str):
                found[key] = self.identifier(value, number)
            else:
                found[key] = value
        return found

    def schema(self, value: Any, where: str, key: str = "") -> Any:
        """Return a tool's schema with names, descriptions and values of an enum replaced."""
        if isinstance(value, list):
            return [self.schema(each, where, key) for each in value]
        if isinstance(value, str) and key in ("name", "description", "enum"):
            return self.text(value, f"{key} {value[:40]!r} in {where}", -1, "schema")
        if not isinstance(value, dict):
            return value
        properties = value.get("properties")
        if not isinstance(properties, dict):
            return {k: self.schema(v, where, k) for k, v in value.items()}
        names = self.keys(properties, f"in {where}", -1, "schema")
        found = dict[str, Any]()
        for name, each in value.items():
            if name == "properties":
                found[name] = {names[k]: self.schema(v, where) for k, v in each.items()}
            elif name == "required" and isinstance(each, list):
                found[name] = [names.get(k, k) if isinstance(k, str) else k for k in each]
            else:
                found[name] = self.schema(each, where, name)
        return found


def outline(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]] | None:
    """Return a key that is equal for messages of equal shape, and the values of their parts.

    This is what :func:`replaced` finds, but faster, and only for messages that are text alone, as
    most are; None for others.
    """
    key = list[str]()
    values = list[str]()
    for message in messages:
        reasoning = None
        for name, value in message.items():
            if name not in _TEXT_FIELDS or type(value) is not str:
                return None
            key.append(name)
            if name == "role" or not value.strip():
                key.append(value)
            elif name == "content":
                values.append(value)
            elif reasoning is None:
                reasoning = value
                values.append(value)
            elif reasoning != value:  # two that differ
                return None
    return "\0".join(key), values


def replaced(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    replace: Replace = sentinel,
) -> Faked:
    """Return prepared messages and tools with their parts replaced, by default by sentinels."""
    walk = _Walk(replace)
    schemas = None
    if tools is not None:
        schemas = [walk.schema(tool, f"the schema of tool {i}") for i, tool in enumerate(tools)]
    replaced = [walk.message(number, message) for number, message in enumerate(messages)]
    return Faked(replaced, schemas, walk.parts)


def sentinels_in(text: str) -> set[int]:
    """Return the indices of the parts whose sentinels are in a text."""
    return {int(found[1] or found[2]) for found in _SENTINEL.finditer(text)}


def marks_in(text: str) -> set[tuple[int, int]]:
    """Return the marks in a text: index of the part, and number of the word from 1."""
    return {(int(found[1]), int(found[2])) for found in _MARK.finditer(text)}


def without_marks(text: str) -> str:
    """Return a text without the marks of words."""
    return _MARK.sub("", text)


class Skeleton:
    """A shape's rendered text: literal text, and the parts between."""

    def __init__(self, text: str) -> None:
        self._literals: list[str] = []
        self._holes: list[tuple[int, int]] = []
        at = 0
        for found in _SENTINEL.finditer(text):
            self._literals.append(text[at : found.start()])
            self._holes.append((int(found[1] or found[2]), found.end()))
            at = found.end()
        self._literals.append(text[at:])

    def fill(self, values: Sequence[Value], text: str) -> list[tuple[int, int]] | None:
        """Find the parts in a rendered text.

        Returns:
            pairs of positions, in the shape's text and in ``text``, at which each piece of literal
            text begins; None if ``text`` is not the shape's text with these parts filled in.
        """
        if not text.startswith(self._literals[0]):
            return None
        at = len(self._literals[0])
        places = [(0, 0)]
        for (index, end), literal in zip(self._holes, self._literals[1:], strict=True):
            for written in _spellings(values[index]):
                after = at + len(written)
                if text.startswith(written, at) and text.startswith(literal, after):
                    break
            else:
                return None
            places.append((end, after))
            at = after + len(literal)
        return places if at == len(text) else None


def translate(places: Sequence[tuple[int, int]], position: int) -> int:
    """Return the position in a text of a position in its shape's text, given ``fill``'s result."""
    theirs, ours = next(pair for pair in reversed(places) if pair[0] <= position)
    return ours + position - theirs


def _spellings(value: Value) -> Iterator[str]:
    """Yield the forms in which templates write a part, verbatim first."""
    if not isinstance(value, str):
        yield json.dumps(value)
        yield str(value)
        return
    yield value
    stripped = (
        value.strip(),
        value.strip("\n"),
        value.lstrip(),
        value.rstrip(),
        value.lstrip("\n"),
        value.rstrip("\n"),
    )
    yield from stripped
    for text in (value, *stripped):
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        yield json.dumps(text)[1:-1]
        yield html.escape(text)
