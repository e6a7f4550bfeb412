"""Names in chat templates: the variables that one reads, and values for them that users give."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

from moefold.data.corpora.records import BadDocument

_GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception"}
_GIVEN |= {"strftime_now", "self", "loop"}
"""Names that rendering sets itself."""
_NOT_JSON = {"True": "true", "False": "false", "None": "null"}


class _MarkedBlock(Extension):
    """The block ``{% generation %}``, read as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of a block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = Environment(extensions=[_MarkedBlock, LoopControlExtension], autoescape=True)
"""Parses templates and never renders one."""


class _NameFinder(TrackingCodeGenerator):
    """Collects the names that a template reads, and computes none of its constants.

    Jinja computes constant expressions when it generates code: ``'x' * 10**9`` takes gigabytes.
    """

    def __init__(self) -> None:
        super().__init__(_ENVIRONMENT)
        self.optimizer = None

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        raise nodes.Impossible

    def visit_EvalContextModifier(self, node: Any, frame: Any) -> None:
        """Take the value of ``{% autoescape %}`` for one that is known only in rendering."""
        frame.eval_ctx.volatile = True


def _undeclared(text: str) -> set[str]:
    """Return the names that a template reads and does not set."""
    finder = _NameFinder()
    finder.visit(_ENVIRONMENT.parse(text))
    return finder.undeclared_identifiers


@lru_cache(maxsize=8)
def template_variables(text: str) -> tuple[str, ...]:
    """Return the variables that a template reads and that users can set, sorted.

    Special tokens such as ``bos_token`` are not among them. Empty for a template that is malformed.
    """
    try:
        names = _undeclared(text)
    except (TemplateError, RecursionError, MemoryError):
        return ()  # compiling it says where the mistake is
    names -= _GIVEN | set(_ENVIRONMENT.globals)
    return tuple(sorted(name for name in names if not name.endswith("_token")))


def check_values(values: Collection[str], known: Sequence[str], where: str) -> None:
    """Raise ``BadDocument`` for a value that a template does not read; ``where`` holds it."""
    unknown = [name for name in values if name not in known]
    if unknown:
        names = f"it reads {', '.join(known)}" if known else "it reads no values"
        detail = f"{where} has {unknown[0]}, which the template does not read; {names}"
        raise BadDocument("a value that the template does not know", f"{detail}; remove it")


def parse_values(given: Sequence[str]) -> dict[str, Any]:
    """Return the values in arguments ``NAME=VALUE``: JSON, or words without quotes.

    Raises:
        ValueError: for an argument without a name, or a value that is neither.
    """
    values = {}
    for argument in given:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--template-value {argument}: must be NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except ValueError as error:
            wrong = text in _NOT_JSON or not text or text.strip()[:1] in '[{"'
            if wrong:
                close = _NOT_JSON.get(text, "JSON, such as true, 3 or a word")
                what = f"--template-value {argument}: the value must be {close}"
                raise ValueError(what) from error
            values[name] = text  # a word: reasoning_effort=high
    return values


def _dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def common_values(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that are the same in all of several mappings."""
    common = CommonValues()
    for values in several:
        common.add(values)
    return common.values


class CommonValues:
    """Collects the values of a template that all conversations have."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep of the values so far those that a further conversation has too."""
        if self._values is None:
            self._values = dict(values)
        else:
            # As text, since true and 1 are equal in Python but not in a template.
            same = {k for k, v in self._values.items() if _dumped(values.get(k)) == _dumped(v)}
            self._values = {k: values[k] for k in same.intersection(values)}

    @property
    def values(self) -> dict[str, Any]:
        """The values that all conversations have, empty without conversations."""
        return self._values or {}
