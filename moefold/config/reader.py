"""YAML reader that returns plain data with the line of each value and never executes code.

Scalars follow YAML 1.2: ``1e-4`` is a number, ``no`` and ``on`` are strings. Keys are always
strings. PyYAML composes a file into a graph of nodes, which is converted here without PyYAML's
constructors. Tags beyond plain data are rejected, and sizes are bounded, as aliases are expanded.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined]  # of the extension module
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.resolver import Resolver

from moefold.config.errors import FieldPath, RunError, Violation

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_DEPTH = 50
TOO_MANY = f"holds more than {MAX_NODES} values"

_CORE = "tag:yaml.org,2002:"


def _int(text: str) -> int:
    if len(text) > 40:
        raise ValueError("it has too many digits")
    value = int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    if not -(2**63) <= value < 2**63:
        raise ValueError("it does not fit in 64 bits")
    return value


def _float(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    value = float(text)
    if math.isinf(value):
        raise OverflowError("it is too large for a 64-bit float")
    return value


_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "null", lambda text: None),
    "bool": (
        r"true|True|TRUE|false|False|FALSE",
        "true or false",
        lambda text: {"true": True, "false": False}[text.lower()],
    ),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "a whole number", _int),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "a number",
        _float,
    ),
}
"""Scalars other than strings in YAML 1.2's core schema: pattern, description for messages, and
conversion."""


class TooManyValues(yaml.YAMLError):
    """A text has more than ``MAX_NODES`` keys and values; the argument is the line."""


class _FastLoader(Composer, CParser, SafeConstructor, Resolver):
    """PyYAML's safe loader, a fifth of whose time takes libyaml's parser."""

    def __init__(self, stream: str) -> None:
        CParser.__init__(self, stream)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)


class CoreLoader(_FastLoader):
    """PyYAML loader for YAML 1.2's core schema that limits nesting and the number of values."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    depth = 0
    count = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose one node with its children."""
        self.depth += 1
        self.count += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=mark)
        if self.count > MAX_NODES:
            raise TooManyValues(self.peek_event().start_mark.line + 1)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


for _name, (_pattern, _, _) in _SCALARS.items():
    CoreLoader.add_implicit_resolver(_CORE + _name, re.compile(f"^(?:{_pattern})$"), None)


@dataclass
class ParsedYaml:
    """Plain data, the line of each leaf, and violations that do not stop reading."""

    data: Any = None
    lines: dict[FieldPath, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    count: int = 0
    """Number of values, aliases expanded."""


def read_yaml(text: str | bytes, source: str = "") -> ParsedYaml:
    """Read one YAML document.

    Raises:
        RunError: the text is not YAML, is too large, or has a tag that is not plain data.
    """
    if len(text) > MAX_BYTES:
        raise _yaml_error(source, None, f"is larger than {MAX_BYTES} bytes", "too-large")
    try:
        document = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        node = CoreLoader(document).get_single_node()
    except UnicodeDecodeError as error:
        raise _yaml_error(source, None, f"is not UTF-8 text: {error}") from error
    except TooManyValues as error:
        raise _yaml_error(source, error.args[0], TOO_MANY, "too-large") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(filter(None, (error.context, error.problem)))
        line = None if mark is None else mark.line + 1
        raise _yaml_error(source, line, f"is not valid YAML: {message}") from error
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise _yaml_error(source, None, f"is not valid YAML: {message}") from error
    converter = _Converter(source)
    if node is not None:
        converter.parsed.data = converter.convert(node, (), ())
        converter.parsed.count = converter.count
    return converter.parsed


def read_value(text: str) -> Any:
    """Parse the value of an override: ``1e-4``, ``[1, 2]``, ``{kind: muon}``, ``plain text``."""
    parsed = read_yaml(text, "override")
    if parsed.violations:
        raise RunError(parsed.violations, source="override")
    return parsed.data


def _yaml_error(source: str, line: int | None, rule: str, violation_id: str = "syntax") -> RunError:
    where = source if line is None else f"{source}:{line}" if source else f"line {line}"
    return RunError([Violation((), None, rule, id=violation_id, where=where)], source=source)


class _Converter:
    """Converts YAML nodes to plain data; aliases become copies."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.parsed = ParsedYaml()
        self.count = 0

    def convert(self, node: Node, path: FieldPath, parents: tuple[Node, ...]) -> Any:
        """Return the data of a node at a path; ``parents`` are its enclosing nodes."""
        self.count += 1
        if any(node is parent for parent in parents):
            raise self._error(node, "an alias contains itself", "too-large")
        if len(parents) >= MAX_DEPTH:
            raise self._error(node, f"is nested deeper than {MAX_DEPTH}", "too-large")
        if self.count > MAX_NODES:
            raise _yaml_error(self.source, None, TOO_MANY, "too-large")
        self._check_tag(node)
        if isinstance(node, ScalarNode) or not node.value:
            self.parsed.lines[path] = node.start_mark.line + 1
        if isinstance(node, ScalarNode):
            scalar_type = node.tag.removeprefix(_CORE)
            if scalar_type == "str":
                return self._text(node)
            _, description, parse = _SCALARS[scalar_type]
            try:
                return parse(node.value)  # fields reject NaN and infinities
            except (ValueError, KeyError, OverflowError) as error:
                message = f"{node.value[:40]!r} is not {description}: {error}"
                raise self._error(node, message) from error
        parents = (*parents, node)
        if isinstance(node, SequenceNode):
            return [self.convert(item, (*path, i), parents) for i, item in enumerate(node.value)]
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            name = self._key(key)
            item = self.convert(value, (*path, name), parents)
            if name in mapping:
                where = f"{self.source}:{key.start_mark.line + 1}"
                rule = "the key occurs twice; keep one"
                self.parsed.violations.append(
                    Violation((*path, name), item, rule, id="duplicate-key", where=where)
                )
            mapping[name] = item
        return mapping

    def _check_tag(self, node: Node) -> None:
        allowed = {MappingNode: ("map",), SequenceNode: ("seq",)}.get(type(node))
        if node.tag.removeprefix(_CORE) not in (allowed or ("str", *_SCALARS)):
            tag = node.tag.replace(_CORE, "!!")
            rule = f"the tag {tag} is refused: a run file holds plain data, never code"
            raise self._error(node, rule, "tag")

    def _key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise self._error(node, "a key must be plain text")
        if node.value == "<<" and not node.style:
            rule = "merge keys (<<) are not supported; use base: to build on another file"
            raise self._error(node, rule)
        self._check_tag(node)
        return self._text(node)

    def _text(self, node: ScalarNode) -> str:
        """Return the string of a node; reject lone surrogates, which UTF-8 cannot encode."""
        try:
            node.value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._error(node, "holds a character that is not valid text") from error
        return node.value

    def _error(self, node: Node, rule: str, violation_id: str = "syntax") -> RunError:
        return _yaml_error(self.source, node.start_mark.line + 1, rule, violation_id)
