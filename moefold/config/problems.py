"""What is wrong with a run file, said so that a person can mend it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

PathPart = str | int


@dataclass(frozen=True)
class Violation:
    """One broken rule: where, what stands there, the rule, and the nearest legal value."""

    path: tuple[PathPart, ...]
    value: Any
    rule: str
    nearest: Any = None

    def under(self, *parents: PathPart) -> "Violation":
        """Return the same violation seen from an enclosing record."""
        return replace(self, path=(*parents, *self.path))
