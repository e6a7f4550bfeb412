"""Violations of a run file, with path and legal value, and the error that carries them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

PathPart = str | int
FieldPath = tuple[PathPart, ...]
"""Keys and list indices from the top of a run file to a value."""


class _Missing:
    """The type of ``MISSING``."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"  # pickled by name, to keep a single instance


MISSING: Any = _Missing()
"""Sentinel for an absent value."""


@dataclass(frozen=True)
class Remove:
    """Suggestion to remove a key."""

    def __repr__(self) -> str:
        return "leave it out"


@dataclass(frozen=True)
class Rename:
    """Suggestion to move the value to another key."""

    to: str

    def __repr__(self) -> str:
        return f"rename to {self.to!r}"


REMOVE = Remove()
MAX_LISTED = 40
"""Violations that are looked up and listed; further ones are counted."""
MAX_SHOWN_PATH = 200
"""Characters of a path that messages show."""
_NO_VALUE = ("missing", "syntax", "tag", "too-large", "no-file", "override")
"""Ids of violations where a value of None means that there is no value."""


@dataclass(frozen=True)
class Violation:
    """A violated rule: path, current value, the rule as text, and the nearest legal value.

    ``nearest`` may also be ``REMOVE``, ``Rename(key)``, or ``MISSING`` if no legal value is known:
    then ``check`` suggests null or the field's default, if that satisfies the rule. ``id`` is a
    stable name of the type of violation; ``where`` is the file and line, or the override, that set
    the value.
    """

    path: FieldPath
    value: Any
    rule: str
    nearest: Any = MISSING
    id: str = "relation"
    where: str = ""

    def under(self, *parents: PathPart) -> "Violation":
        """Return the violation with its path relative to an enclosing record."""
        return replace(self, path=(*parents, *self.path))


class RunError(ValueError):
    """All violations of a run at once.

    ``violations`` are in the order in which to fix them, at most ``MAX_LISTED``; ``unlisted`` is
    the number of others. ``data`` is the raw data that was checked, after ``base`` and overrides.
    The message is a count, then the path, value, rule and nearest value of each.
    """

    def __init__(
        self,
        violations: Iterable[Violation],
        data: Any = None,
        source: str = "",
        unlisted: int = 0,
    ) -> None:
        found = tuple(violations)
        self.violations = found[:MAX_LISTED]
        self.data = data
        self.source = source
        self.unlisted = unlisted + len(found) - len(self.violations)
        count = len(self.violations) + self.unlisted
        errors = "error" if count == 1 else "errors"
        head = f"{source or 'the run'}: {count:,} {errors}"
        lines = [line for item in self.violations for line in format_violation(item)]
        lines += [f"  and {self.unlisted:,} more"] if self.unlisted else []
        super().__init__("\n".join([head, *lines]))

    def __reduce__(self) -> tuple[type["RunError"], tuple[Any, ...]]:
        return type(self), (self.violations, self.data, self.source, self.unlisted)


def format_violation(violation: Violation) -> list[str]:
    """Format a violation as two or three lines."""
    where = f"  [{violation.where}]" if violation.where else ""
    no_value = violation.value is None and violation.id in _NO_VALUE
    value = "" if no_value else f" = {format_value(violation.value)}"
    no_path = "(override)" if violation.id == "override" else "(whole file)"
    path = shorten(dotted(violation.path), MAX_SHOWN_PATH) or no_path
    lines = [f"  {path}{value}{where}", f"      {violation.rule}"]
    if violation.nearest is not MISSING:
        lines.append(f"      nearest: {format_value(violation.nearest)}")
    return lines


def format_value(value: Any) -> str:
    """Format a value as in a run file, truncated to 100 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        items = [f"{key}: {format_value(item)}" for key, item in value.items()]
        text = "{" + ", ".join(items) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(format_value(item) for item in value) + "]"
    elif isinstance(value, Remove | Rename):
        return repr(value)
    else:
        text = repr(str(value) if isinstance(value, PurePath) else value)
    return shorten(text, 100)


def shorten(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def dotted(path: Iterable[PathPart]) -> str:
    """Format a path as in ``data.train[0].weight``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
