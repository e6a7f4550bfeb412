"""Reading YAML as plain data, with the line of each value; nothing in a file is ever executed.

Scalars follow YAML 1.2: ``1e-4`` is a number, ``no`` and ``on`` are text. Keys are always text. A
file is composed to a graph of nodes and converted here, so PyYAML's constructors are not used at
all; tags beyond plain data are refused. Sizes are bounded before anything is expanded.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from moefold.config.problems import RunError, Spot, Violation

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_DEPTH = 50

_CORE = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


class Scalars(BaseResolver):
    """Tells null, true, numbers and text apart by YAML 1.2's core schema."""


for _name, _pattern, _first in _SCALARS:
    Scalars.add_implicit_resolver(_CORE + _name, re.compile(f"^(?:{_pattern})$"), _first)


class _Graph(Reader, Scanner, Parser, Composer, Scalars):
    """Reads text up to the graph of nodes, no deeper than ``MAX_DEPTH``."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        Scalars.__init__(self)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


@dataclass
class Parsed:
    """Plain data, the line on which each leaf stands, and what can be mended later."""

    data: Any
    lines: dict[Spot, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def read_yaml(text: str | bytes, source: str = "") -> Parsed:
    """Read one YAML document.

    Raises:
        RunError: where it is no YAML, too large, or holds a tag that is not plain data.
    """
    if len(text) > MAX_BYTES:
        raise _refuse(source, None, f"larger than {MAX_BYTES} bytes", "too-large")
    try:
        whole = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        node = _Graph(whole).get_single_node()
    except UnicodeDecodeError as error:
        raise _refuse(source, None, f"is not UTF-8 text: {error}", "syntax") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        said = " ".join(filter(None, (error.context, error.problem)))
        raise _refuse(source, line, f"is not valid YAML: {said}", "syntax") from error
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise _refuse(source, None, f"is not valid YAML: {said}", "syntax") from error
    parsed = Parsed(None)
    if node is not None:
        _weigh(node, source)
        parsed.data = _convert(node, (), parsed, source)
    return parsed


def read_value(text: str) -> Any:
    """Read the value of an override: ``1e-4``, ``[1, 2]``, ``{kind: muon}``, ``plain text``."""
    parsed = read_yaml(text, "override")
    if parsed.violations:
        raise RunError(parsed.violations, source="override")
    return parsed.data


def _refuse(source: str, line: int | None, rule: str, sort: str) -> RunError:
    where = source if line is None else f"{source}:{line}" if source else f"line {line}"
    return RunError([Violation((), None, rule, id=sort, where=where, edits=())], source=source)


def _weigh(root: Node, source: str) -> None:
    """Refuse aliases that expand to too many or too deep nodes, without expanding them."""
    known: dict[int, tuple[int, int]] = {}
    unfinished: set[int] = set()

    def weigh(node: Node) -> tuple[int, int]:
        key = id(node)
        if key in unfinished:
            line = node.start_mark.line + 1
            raise _refuse(source, line, "an alias contains itself", "too-large")
        if key not in known:
            unfinished.add(key)
            below = [weigh(child) for child in _children(node)]
            unfinished.remove(key)
            depth = 1 + max((item[1] for item in below), default=0)
            known[key] = 1 + sum(item[0] for item in below), depth
        return known[key]

    count, depth = weigh(root)
    if count > MAX_NODES:
        raise _refuse(source, None, f"holds {count} values, more than {MAX_NODES}", "too-large")
    if depth > MAX_DEPTH:
        raise _refuse(source, None, f"is nested deeper than {MAX_DEPTH}", "too-large")


def _children(node: Node) -> list[Node]:
    if isinstance(node, SequenceNode):
        return node.value
    if isinstance(node, MappingNode):
        return [item for pair in node.value for item in pair]
    return []


def _convert(node: Node, path: Spot, parsed: Parsed, source: str) -> Any:
    """Turn a node into plain data, noting the line of each leaf."""
    _check_tag(node, source)
    if isinstance(node, MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = _key(key, source)
            if name in found:
                parsed.violations.append(_twice((*path, name), found[name], key, source))
            found[name] = _convert(value, (*path, name), parsed, source)
        if not found:
            parsed.lines[path] = node.start_mark.line + 1
        return found
    if isinstance(node, SequenceNode):
        if not node.value:
            parsed.lines[path] = node.start_mark.line + 1
        return [_convert(item, (*path, i), parsed, source) for i, item in enumerate(node.value)]
    assert isinstance(node, ScalarNode)
    parsed.lines[path] = node.start_mark.line + 1
    return _scalar(node, source)


def _twice(path: Spot, value: Any, key: Node, source: str) -> Violation:
    rule = "the key stands twice; write it once"
    where = f"{source}:{key.start_mark.line + 1}"
    return Violation(path, value, rule, value, "duplicate-key", where, edits=())


def _check_tag(node: Node, source: str) -> None:
    sort = {MappingNode: ("map",), SequenceNode: ("seq",)}.get(
        type(node), ("str", "null", "bool", "int", "float")
    )
    if node.tag not in [_CORE + name for name in sort]:
        tag = node.tag.replace(_CORE, "!!")
        rule = f"the tag {tag} is refused: a run file holds plain data, never code"
        raise _refuse(source, node.start_mark.line + 1, rule, "tag")


def _key(node: Node, source: str) -> str:
    if not isinstance(node, ScalarNode):
        raise _refuse(source, node.start_mark.line + 1, "a key must be plain text", "syntax")
    if node.tag == _CORE + "merge" or (node.value == "<<" and node.style is None):
        rule = "merge keys (<<) are not supported; use base: to build on another file"
        raise _refuse(source, node.start_mark.line + 1, rule, "syntax")
    _check_tag(node, source)
    return _text(node, source)


def _text(node: ScalarNode, source: str) -> str:
    """Return text that can be written down again; lone surrogates cannot."""
    try:
        node.value.encode("utf-8")
    except UnicodeEncodeError as error:
        rule = "holds a character that is not valid text"
        raise _refuse(source, node.start_mark.line + 1, rule, "syntax") from error
    return node.value


def _scalar(node: ScalarNode, source: str) -> Any:
    """Return the value of a scalar; NaN and infinities are left for the fields to refuse."""
    sort, text = node.tag.removeprefix(_CORE), node.value
    if sort == "str":
        return _text(node, source)
    if sort == "null":
        return None
    try:
        if sort == "bool":
            return {"true": True, "false": False}[text.lower()]
        if sort == "int":
            return _whole(text)
        return _real(text)
    except (ValueError, KeyError, OverflowError) as error:
        rule = f"{text[:40]!r} is not {_WORDS[sort]}: {error}"
        raise _refuse(source, node.start_mark.line + 1, rule, "syntax") from error


def _whole(text: str) -> int:
    if len(text) > 40:
        raise ValueError("it has too many digits")
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    value = int(text, base)
    if not -(2**63) <= value < 2**63:
        raise ValueError("it does not fit 64 bits")
    return value


def _real(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    value = float(text)
    if math.isinf(value):
        raise OverflowError("it is beyond the largest number")
    return value
