"""Chat templates: rendering of prepared messages to text.

A template is third-party code and runs in jinja2's sandbox, with the names and options that
``transformers`` provides. What it writes inside ``{% generation %}`` is marked as an answer. Limits
of time and size are in :mod:`moefold.data.chats.renderer`, which calls this module in a child
process.
"""

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, Undefined, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moefold.data.config import DataError
from moefold.data.corpora.records import BadDocument

OPEN = "\ufdd0"
CLOSE = "\ufdd1"
"""Noncharacters, which do not occur in interchanged text (Unicode 16, section 23.7)."""
MAX_CHARS = 4 * 2**20
"""Most characters that a template may write, besides four for each of the conversation's."""
_LINES = re.compile(r"^debug_info = '([\d=&]*)'", re.MULTILINE)
"""Where jinja2 records the lines of its Python code: ``template line=code line&...``."""


class Rendered(NamedTuple):
    """A rendered conversation, and the character spans of its answers."""

    text: str
    spans: tuple[tuple[int, int], ...]
    marked: bool = False
    """Whether the template marks answers with ``{% generation %}``."""


class TimeUp(BaseException):
    """The time for a conversation is over; no ``Exception``, which jinja2 might suppress."""


class LimitExceeded(Exception):
    """A template exceeds a limit; the argument says which, and at which line."""


class _TooMuchText(Exception):
    """The template has written more than it may."""


class _HalfCharacter(Exception):
    """The template has written half of a surrogate pair, which no encoding represents."""


class _MissingVariable(Undefined):
    """Undefined variable: printing it is an error, except for special tokens; testing it is not."""

    def __str__(self) -> str:
        name = str(self._undefined_name)
        if name.endswith("_token"):  # the tokenizer lacks this token
            return ""
        self._fail_with_undefined_error()


class _PublicNamespace(Namespace):
    """jinja2's ``namespace``, without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *others = args  # so that a template can set the name ``self``
        attributes = dict(*others, **values)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """The block ``{% generation %}``, whose content the model generates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block, and enclose its output in marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the template.
        special: special tokens by name, such as ``bos_token``.
        source: name of the template in messages.
        today: the date for the template; None makes its use an error, as data would depend on it.
        max_chars: most characters that it may write, besides four for each of a conversation's.
        guard: entered whenever the template is compiled or rendered; it may raise ``TimeUp``.

    Raises:
        DataError: if the template cannot be compiled; the message names the line.
    """

    def __init__(
        self,
        text: str,
        special: Mapping[str, str],
        source: str = "chat template",
        today: datetime | None = None,
        max_chars: int = MAX_CHARS,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
            undefined=_MissingVariable,
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": self._strftime_now,
            "namespace": _PublicNamespace,
        }
        self.text = text
        self.source = source
        self.max_chars = max_chars
        self._special = special
        self._today = today
        self._guard = guard or nullcontext()
        try:
            with self._guard:
                self._inner = environment.from_string(text)
        except (Exception, TimeUp) as error:  # jinja2 and Python's compiler raise a dozen kinds
            line = _line_of_failure(error, environment, text)
            where = f"{source}: line {line} of the chat template" if line else source
            remedy = "correct it, or set data.tokenizer.template"
            raise DataError(f"{where}: {_describe(error)}; {remedy}") from error

    def _strftime_now(self, form: str) -> str:
        if self._today is None:
            raise TemplateError(
                "it writes the current date, so prepared data changes by the day; give the value "
                "that it asks for instead (chat_template_kwargs), or write a date in its place in "
                "a file of your own (data.tokenizer.template)"
            )
        return self._today.strftime(form)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
        max_chars: int | None = None,
    ) -> Rendered:
        """Render a conversation; with ``prompt``, append the beginning of an answer.

        Args:
            messages: messages as :mod:`moefold.data.chats.messages` prepares them.
            tools: schemas of the tools.
            options: more variables of the template.
            prompt: whether to append the beginning of an answer.
            max_chars: most characters of the text (default: the template's).

        Raises:
            BadDocument: if the template fails; the message names the template's line.
            LimitExceeded: if it takes too much time or memory, or writes too much.
        """
        variables = {"documents": None, **self._special, **(options or {})}
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        limit = self.max_chars if max_chars is None else max_chars
        try:
            with self._guard:
                marked = self._written(variables, limit)
                if not marked.isascii():
                    self._check_characters(marked, variables, limit)
        except (Exception, TimeUp) as error:  # third-party code can raise anything
            raise self._explained(error) from error
        return _split_marks(marked)

    def _written(self, variables: Mapping[str, Any], limit: int, every: bool = False) -> str:
        """Return what the template writes; with ``every``, check each piece's characters."""
        pieces = list[str]()
        size = 0
        stream = self._inner.generate(variables)
        for piece in stream:
            size += len(piece)
            pieces.append(piece)
            # An error thrown into the template has the line that wrote the piece.
            if size > limit:
                _throw(stream, _TooMuchText(f"more than {limit:,} characters"))
            if every and not _is_encodable(piece):
                _throw(stream, _HalfCharacter())
        return "".join(pieces)

    def _check_characters(self, text: str, variables: Mapping[str, Any], limit: int) -> None:
        """Raise if the text has half of a surrogate pair, at the line that writes it."""
        if not _is_encodable(text):
            self._written(variables, limit, every=True)
            raise _HalfCharacter  # its two halves are in two pieces

    def _explained(self, error: BaseException) -> BadDocument | LimitExceeded:
        """Return a failure of the template as an error that names its line."""
        lines = [
            frame.lineno or 0
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == "<template>"
        ]
        line = lines[-1] if lines else 0
        if isinstance(error, TimeUp) and lines:  # jinja2 translates the lines of others
            line = self._inner.get_corresponding_lineno(line)
        where = f" (line {line} of {self.source})" if line else f" ({self.source})"
        if isinstance(error, UndefinedError):
            detail = f"{error}{where}; add it to the data, or correct the template"
            return BadDocument("the template needs a missing value", detail)
        if isinstance(error, TimeUp | _TooMuchText | MemoryError):
            return LimitExceeded(f"{_describe(error)}{where}")
        return BadDocument("the template fails", f"{_describe(error)}{where}")


def _throw(stream: Iterator[str], error: Exception) -> None:
    stream.throw(error)  # type: ignore[attr-defined]


def _split_marks(marked: str) -> Rendered:
    """Return a text without its marks, and the non-empty spans between them."""
    if OPEN not in marked:
        return Rendered(marked, ())
    spans = list[tuple[int, int]]()
    parts = list[str]()
    start = 0
    for number, part in enumerate(marked.replace(CLOSE, OPEN).split(OPEN)):
        if number % 2 and part:
            spans.append((start, start + len(part)))
        parts.append(part)
        start += len(part)
    return Rendered("".join(parts), tuple(spans), marked=True)


def _describe(error: BaseException) -> str:
    """Return an error of a template as a clause."""
    if isinstance(error, RecursionError):
        return "it recurses without end, or is nested too deeply"
    if isinstance(error, TimeUp):
        return f"it takes more than {error}"
    if isinstance(error, _TooMuchText):
        return f"it writes {error}"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, _HalfCharacter):
        return "it writes half of a surrogate pair, which is no character"
    if isinstance(error, TemplateSyntaxError):
        return str(error.message)
    if isinstance(error, TemplateError):
        return str(error)
    text = str(error).partition(" (")[0] if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"


def _line_of_failure(
    error: BaseException, environment: ImmutableSandboxedEnvironment, text: str
) -> int | None:
    """Return the template's line at which compilation failed, if that can be told."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    if isinstance(error, SyntaxError):  # of the Python code that jinja2 wrote
        recorded = _LINES.search(str(environment.compile(text, raw=True)))
        pairs = [pair.split("=") for pair in recorded[1].split("&")] if recorded else []
        known = [int(line) for line, code in pairs if int(code) <= (error.lineno or 0)]
        return known[-1] if known else 1
    frame: TracebackType | None = error.__traceback__
    found = None
    while frame is not None:  # the innermost of jinja2's frames that knows its line
        values = frame.tb_frame.f_locals
        stream = getattr(values.get("self"), "stream", None)
        for line in (
            values.get("lineno"),
            getattr(values.get("node"), "lineno", None),
            getattr(getattr(stream, "current", None), "lineno", None),
        ):
            found = line if isinstance(line, int) else found
        frame = frame.tb_next
    return found


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_refuse_json,
    )


def _refuse_json(value: Any) -> NoReturn:
    """Raise what is wrong with a value that is no JSON."""
    if isinstance(value, Undefined):
        str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
