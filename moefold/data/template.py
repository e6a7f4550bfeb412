"""Chat templates: rendering of conversations to text, with the character spans of answers.

A template is third-party code and runs in jinja2's sandbox, with the names and options that
``transformers`` provides. Answers are the text inside ``{% generation %}``. In a template without
such blocks, an answer is what its message adds to the conversation before it; a template that
renders earlier turns differently once others follow is rejected.
"""

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
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
ASSISTANT = "assistant"


class Rendered(NamedTuple):
    """A rendered conversation, and the character spans of its answers."""

    text: str
    spans: tuple[tuple[int, int], ...]
    marked: bool = False
    """Whether the template marks answers with ``{% generation %}``."""


class _MissingVariable(Undefined):
    """Undefined variable: printing it is an error, except for special tokens; testing it is not."""

    def __str__(self) -> str:
        name = str(self._undefined_name)
        if name.endswith("_token"):  # the tokenizer lacks this token
            return ""
        self._fail_with_undefined_error()


class _GenerationBlock(Extension):
    """The block ``{% generation %}``, whose content the model generates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block, and enclose its output in marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the template.
        special: special tokens by name, such as ``bos_token``.
        source: name of the template in messages.
        today: the date for the template; None makes its use an error, as data would depend on it.

    Raises:
        DataError: if the syntax is wrong; the message names the line.
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
            extensions=[_GenerationBlock, LoopControlExtension],
            undefined=_MissingVariable,
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._strftime_now}
        self._special, self._today, self._source = special, today, source
        self.text = text
        try:
            self._inner = environment.from_string(text)
        except TemplateSyntaxError as error:
            message = f"{source}: line {error.lineno} of the chat template: {error.message}"
            raise DataError(f"{message}; correct it, or set data.tokenizer.template") from error

    def _strftime_now(self, form: str) -> str:
        if self._today is None:
            raise TemplateError("it writes the current date, so prepared data changes by the day")
        return self._today.strftime(form)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        **options: Any,
    ) -> Rendered:
        """Render a conversation; with ``prompt``, append the beginning of an answer.

        Raises:
            BadDocument: if the template fails; the message names the template's line.
        """
        data = {"messages": [_normalise(m) for m in messages], "tools": tools, "documents": None}
        try:
            variables = {**self._special, **data, **options, "add_generation_prompt": prompt}
            marked = self._inner.render(variables)
        except RecursionError as error:
            raise BadDocument("the template fails", "it recurses without end") from error
        except Exception as error:  # third-party code can raise anything
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            where = f" (line {lines[-1]} of {self._source})" if lines else ""
            if isinstance(error, UndefinedError):
                detail = f"{error}{where}; add it to the data, or correct the template"
                raise BadDocument("the template needs a missing value", detail) from error
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise BadDocument("the template fails", f"{kind}{error}{where}") from error
        spans, parts, start = list[tuple[int, int]](), list[str](), 0
        for number, part in enumerate(marked.replace(_CLOSE, _OPEN).split(_OPEN)):
            if number % 2:
                spans.append((start, start + len(part)))
            parts.append(part)
            start += len(part)
        non_empty = tuple(span for span in spans if span[0] < span[1])
        return Rendered("".join(parts), non_empty, bool(spans))

    def render_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        trained: Collection[int],
        **options: Any,
    ) -> Rendered:
        """Render a conversation, with the spans of the answers whose messages are ``trained``.

        Raises:
            BadDocument: if the template fails, or the spans cannot be determined.
        """
        full = self.render(messages, tools, **options)
        text = json.dumps([messages, tools, options], ensure_ascii=False, default=str)
        if _OPEN in text or _CLOSE in text:
            raise BadDocument("invalid text", "it contains the noncharacter U+FDD0 or U+FDD1")

        def answer_start(number: int) -> int:
            """Return the position in the text at which the answer in message ``number`` begins."""
            before = self.render(messages[:number], tools, prompt=True, **options).text
            self._require_prefix(full.text, before, number)
            return len(before)

        def answer_span(number: int) -> tuple[int, int]:
            """Return where the answer in message ``number`` begins and ends in the text."""
            start, until = answer_start(number), full.text
            if number + 1 < len(messages):
                until = self.render(messages[: number + 1], tools, **options).text
                self._require_prefix(full.text, until, number)
            return start, len(until)

        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        if full.marked and set(answers) <= set(trained):
            return full
        spans = [answer_span(number) for number in answers if number in trained]
        if not full.marked:
            return Rendered(full.text, tuple(spans))
        inside = (s for s in full.spans if any(a <= s[0] and s[1] <= b for a, b in spans))
        return full._replace(spans=tuple(inside))

    def _require_prefix(self, full: str, head: str, number: int) -> None:
        """Raise ``BadDocument`` if a rendered beginning is not a prefix of the full text."""
        if full.startswith(head):
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(full, head, strict=False)) if a != b), len(full)
        )
        raise BadDocument(
            "the template changes earlier messages",
            f"up to message {number} it writes {head[at : at + 40]!r} where the whole conversation "
            f"has {full[at : at + 40]!r}, so answer {number} cannot be located; mark answers in "
            "the template with {% generation %}, or train only last answers (answers: last)",
        )


def _normalise(message: Message) -> dict[str, Any]:
    """Drop a message's nulls, and copy its reasoning to both names that templates use."""
    values = {key: value for key, value in message.items() if value is not None}
    reasoning = next((values[name] for name in _REASONING if name in values), None)
    if reasoning is None:
        return values
    return {"thinking": reasoning} | values | {"reasoning_content": reasoning}


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
