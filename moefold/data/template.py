"""Chat templates: rendering of conversations to text, and the characters that are answers.

A template is third-party code and runs in jinja2's sandbox, with the names and options that
``transformers`` gives it. Answers are the text inside ``{% generation %}``. In a template without
such blocks, an answer is what its message adds to the conversation before it; a template that
renders earlier turns differently once others follow is refused.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, Undefined, UndefinedError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moefold.data.config import DataError
from moefold.data.sources import BadDocument

Message = Mapping[str, Any]
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters, which do not occur in interchanged text (Unicode 16, section 23.7)."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
ANSWER = "assistant"


class Rendered(NamedTuple):
    """A rendered conversation, and the character spans of its answers."""

    text: str
    spans: tuple[tuple[int, int], ...]
    marked: bool = False
    """Whether the template marks answers with ``{% generation %}``."""


class _Lacking(Undefined):
    """Undefined variable: printing it is an error, except for special tokens; testing is not."""

    def __str__(self) -> str:
        name = str(self._undefined_name)
        if name.endswith("_token"):  # a tokenizer without such a token
            return ""
        self._fail_with_undefined_error()


class _Generation(Extension):
    """The block ``{% generation %}``, whose content the model has to write."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block, and surround its output with marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A folder's chat template.

    Args:
        text: the template.
        special: texts of special tokens by their names, such as ``bos_token``.
        source: name of the template in messages.
        today: the date that it may print; None makes that an error, as data would depend on it.

    Raises:
        DataError: if the syntax is wrong; names the line.
    """

    def __init__(
        self,
        text: str,
        special: Mapping[str, str],
        source: str = "chat template",
        today: datetime | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            undefined=_Lacking,
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._date}
        self._special, self._today, self._source = special, today, source
        try:
            self._inner = environment.from_string(text)
        except TemplateSyntaxError as error:
            said = f"{source}: line {error.lineno} of the chat template: {error.message}"
            raise DataError(f"{said}; correct it, or set data.tokenizer.template") from error

    def _date(self, form: str) -> str:
        if self._today is None:
            raise TemplateError("it writes the current date, so prepared data changes by the day")
        return self._today.strftime(form)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        **more: Any,
    ) -> Rendered:
        """Return a conversation's text; with ``prompt``, the beginning of an answer follows.

        Raises:
            BadDocument: if the template fails on it; names the template's line.
        """
        held = {"messages": [_plain(m) for m in messages], "tools": tools, "documents": None}
        try:
            given = {**self._special, **held, **more, "add_generation_prompt": prompt}
            marked = self._inner.render(given)
        except RecursionError as error:
            raise BadDocument("the template fails", "it recurses without end") from error
        except Exception as error:  # third-party code can raise anything
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            where = f" (line {lines[-1]} of {self._source})" if lines else ""
            if isinstance(error, UndefinedError):
                said = f"{error}{where}; add it to the data, or correct the template"
                raise BadDocument("the template needs a missing value", said) from error
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise BadDocument("the template fails", f"{kind}{error}{where}") from error
        spans, parts, begun = list[tuple[int, int]](), list[str](), 0
        for number, part in enumerate(marked.replace(_CLOSE, _OPEN).split(_OPEN)):
            if number % 2:
                spans.append((begun, begun + len(part)))
            parts.append(part)
            begun += len(part)
        full = tuple(span for span in spans if span[0] < span[1])
        return Rendered("".join(parts), full, bool(spans))

    def answers(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, first: int, **more: Any
    ) -> Rendered:
        """Return a conversation's text and the spans of its answers from message ``first`` on.

        Raises:
            BadDocument: if the template fails, or the spans cannot be determined.
        """
        whole = self.render(messages, tools, **more)
        said = json.dumps([messages, tools, more], ensure_ascii=False, default=str)
        if _OPEN in said or _CLOSE in said:
            raise BadDocument("invalid text", "it contains the noncharacter U+FDD0 or U+FDD1")

        def begin(number: int) -> int:
            """Return the character at which the answer in message ``number`` begins."""
            before = self.render(messages[:number], tools, prompt=True, **more).text
            self._demand(whole.text, before, number)
            return len(before)

        if whole.marked:
            begun = begin(first) if first else 0
            return whole._replace(spans=tuple(s for s in whole.spans if s[0] >= begun))
        spans = []
        for number in range(first, len(messages)):
            if messages[number]["role"] == ANSWER:
                begun, until = begin(number), whole.text
                if number + 1 < len(messages):
                    until = self.render(messages[: number + 1], tools, **more).text
                    self._demand(whole.text, until, number)
                spans.append((begun, len(until)))
        return Rendered(whole.text, tuple(spans))

    def _demand(self, whole: str, part: str, number: int) -> None:
        """Raise ``BadDocument`` if a rendered beginning is not a prefix of the whole text."""
        if whole.startswith(part):
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), len(whole)
        )
        raise BadDocument(
            "the template changes earlier messages",
            f"up to message {number} it writes {part[at : at + 40]!r} where the whole conversation "
            f"has {whole[at : at + 40]!r}, so answer {number} cannot be located; mark answers in "
            "the template with {% generation %}, or train only last answers (answers: last)",
        )


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without nulls, and its reasoning under both names that templates use."""
    held = {key: value for key, value in message.items() if value is not None}
    reasoning = next((held[name] for name in _REASONING if name in held), None)
    if reasoning is None:
        return held
    return {"thinking": reasoning} | held | {"reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
