"""What is wrong with a run file, said so that a person can mend it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PathPart = str | int
Spot = tuple[PathPart, ...]


@dataclass(frozen=True)
class Remove:
    """The nearest legal value is to leave the key out."""

    def __repr__(self) -> str:
        return "leave it out"


@dataclass(frozen=True)
class Rename:
    """The nearest legal value is the same value under another key."""

    to: str

    def __repr__(self) -> str:
        return f"rename to {self.to!r}"


REMOVE = Remove()
_SILENT = ("missing", "syntax", "tag", "too-large", "no-file", "override")


@dataclass(frozen=True)
class Edit:
    """One change to raw data: put ``value`` at ``path``, or take away what stands there."""

    path: Spot
    value: Any


@dataclass(frozen=True)
class Violation:
    """One broken rule: where, what stands there, the rule, and the nearest legal value.

    ``nearest`` may also be ``REMOVE`` (leave the key out) or ``Rename(to)``; ``None`` in a rule of
    a record means null where null is legal, and otherwise "search one for me". ``id`` is a stable
    name of the sort of violation, ``where`` the file and line or the override that is to blame,
    and ``edits`` the exact changes that ``repair`` makes.
    """

    path: Spot
    value: Any
    rule: str
    nearest: Any = None
    id: str = "relation"
    where: str = ""
    edits: tuple[Edit, ...] | None = None

    def under(self, *parents: PathPart) -> "Violation":
        """Return the same violation seen from an enclosing record."""
        return replace(self, path=(*parents, *self.path))


class RunError(ValueError):
    """Everything that is wrong with a run, all at once.

    ``violations`` are in the order in which they are best mended, ``data`` is what was judged
    (after ``base`` and overrides), so that ``repair(error.data, error.violations)`` is legal.
    """

    def __init__(self, violations: Iterable[Violation], data: Any = None, source: str = "") -> None:
        self.violations = tuple(violations)
        self.data = data
        self.source = source
        super().__init__(self.text())

    def __reduce__(self) -> tuple[type["RunError"], tuple[Any, ...]]:
        return type(self), (self.violations, self.data, self.source)

    def text(self) -> str:
        """Return the error as plain lines: a count, then path, value, rule and nearest of each."""
        count = len(self.violations)
        head = f"{self.source or 'the run'}: {count} thing{'s' if count != 1 else ''} to mend"
        return "\n".join([head, *(line for item in self.violations for line in describe(item))])


def describe(violation: Violation) -> list[str]:
    """Return a violation as two or three plain lines."""
    where = f"  [{violation.where}]" if violation.where else ""
    silent = violation.value is None and violation.id in _SILENT
    said = "" if silent else f" = {show(violation.value)}"
    nowhere = "(override)" if violation.id == "override" else "(whole file)"
    lines = [f"  {dotted(violation.path) or nowhere}{said}{where}"]
    lines.append(f"      {violation.rule}")
    if violation.edits != () or violation.nearest is not None:
        lines.append(f"      nearest: {show(violation.nearest)}")
    return lines


def show(value: Any, width: int = 100) -> str:
    """Return a short form of a value as it would stand in a run file."""
    if isinstance(value, Remove | Rename):
        return repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = _flow(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, Path):
        return repr(str(value))
    return repr(value)


def dotted(path: Iterable[PathPart]) -> str:
    """Return a path as people write it: ``data.train[0].weight``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def repair(data: Any, violations: Sequence[Violation]) -> Any:
    """Return a copy of raw ``data`` with the nearest legal value of each violation put in."""
    mended = copied(data)
    for violation in violations:
        mended = amend(mended, edits_of(violation))
    return mended


def copied(data: Any) -> Any:
    """Return a copy of raw data in which no mapping or list stands at two places."""
    if isinstance(data, dict):
        return {key: copied(item) for key, item in data.items()}
    if isinstance(data, list):
        return [copied(item) for item in data]
    return data


def edits_of(violation: Violation) -> tuple[Edit, ...]:
    """Return the changes that a violation asks for."""
    if violation.edits is not None:
        return violation.edits
    if isinstance(violation.nearest, Rename):
        renamed = (*violation.path[:-1], violation.nearest.to)
        return Edit(violation.path, REMOVE), Edit(renamed, violation.value)
    return (Edit(violation.path, violation.nearest),)


def amend(data: Any, edits: Iterable[Edit]) -> Any:
    """Make changes to raw data in place and return it; missing mappings on the way are made."""
    for edit in edits:
        if not edit.path:
            data = copied(edit.value)
            continue
        inside = data
        for part, following in zip(edit.path, edit.path[1:], strict=False):
            inside = _enter(inside, part, {} if isinstance(following, str) else [])
        _set(inside, edit.path[-1], edit.value)
    return data


def _enter(inside: Any, part: PathPart, fresh: Any) -> Any:
    if isinstance(inside, dict):
        if not isinstance(inside.get(part), dict | list):
            inside[part] = fresh
        return inside[part]
    assert isinstance(inside, list) and isinstance(part, int)
    if part == len(inside):
        inside.append(fresh)
    return inside[part]


def _set(inside: Any, key: PathPart, value: Any) -> None:
    if isinstance(inside, dict):
        if value == REMOVE:
            inside.pop(key, None)
        else:
            inside[key] = copied(value)
        return
    assert isinstance(inside, list) and isinstance(key, int)
    if value == REMOVE:
        del inside[key : key + 1]
    elif key == len(inside):
        inside.append(copied(value))
    else:
        inside[key] = copied(value)
