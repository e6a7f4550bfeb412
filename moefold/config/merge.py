"""Merging of raw data from bases, a file and overrides, with the origin of each value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moefold.config.base import Record
from moefold.config.errors import MISSING, FieldPath, PathPart, Violation, dotted
from moefold.config.fields import (
    FieldSpec,
    child_spec,
    get_at,
    leaves,
    other_kind,
    set_at,
    spec_at,
    with_parents,
)


@dataclass(frozen=True)
class Origin:
    """Origin of a value: its sort, and the file and line, the data's name, or the override."""

    sort: Literal["file", "given", "base", "override", "default"]
    where: str = ""
    folder: Path | None = field(default=None, compare=False)
    """Folder to which file paths are relative; None is the working folder."""

    def __str__(self) -> str:
        return f"{self.sort} {self.where}".strip()


@dataclass(frozen=True)
class Layer:
    """One source of raw data, with the line of each leaf if it is a file."""

    data: Mapping[str, Any]
    sort: Literal["file", "given", "base"]
    name: str = ""
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    folder: Path | None = None

    def origin(self, path: FieldPath) -> Origin:
        """Return the origin of this layer's value at a path: the first line of that value."""
        below = [line for leaf, line in self.lines.items() if leaf[: len(path)] == path]
        around = [self.lines[path[:end]] for end in range(len(path)) if path[:end] in self.lines]
        at = f":{min(below or around)}" if below or around else ""
        return Origin(self.sort, self.name + at, self.folder)


class MergedData:
    """Raw data for a record class, merged layer by layer, with the origin of each leaf.

    Mappings are merged key by key; lists and scalars are replaced. Where a later layer chooses
    another kind in a slot, all fields of the earlier kind are dropped.
    """

    def __init__(self, cls: type[Record]) -> None:
        self.spec = FieldSpec(cls)
        self.data: Any = {}
        self.origins: dict[FieldPath, Origin] = {}

    def add(self, layer: Layer) -> None:
        """Merge a layer over the present data."""
        self.data = self._merged(self.spec, self.data, layer.data, (), layer)

    def _merged(self, spec: FieldSpec, under: Any, over: Any, path: FieldPath, layer: Layer) -> Any:
        over = spec.expanded(over)
        both = isinstance(over, Mapping) and isinstance(under, Mapping)
        kept: Mapping[str, Any] = under if both and not other_kind(spec, under, over) else {}
        if not kept and under is not MISSING:
            self._forget(path)
        if not isinstance(over, Mapping) or not (over or kept):
            self.origins |= {leaf: layer.origin(leaf) for leaf, _ in leaves(over, path)}
            return over
        merged, whole = dict(kept), {**kept, **over}
        for key, item in over.items():
            below = child_spec(spec, whole, key)
            merged[key] = self._merged(below, kept.get(key, MISSING), item, (*path, key), layer)
        return merged

    def origin(self, path: FieldPath) -> Origin:
        """Return the origin of the value at a path, or of the nearest enclosing value."""
        for end in range(len(path), 0, -1):
            inner = (origin for leaf, origin in self.origins.items() if leaf[:end] == path[:end])
            first = next(inner, None)
            if first is not None:
                return first
        return Origin("default")

    def override(self, path: FieldPath, value: Any, text: str, add: bool) -> Violation | None:
        """Set the value at a path, or append it to the list there if ``add``.

        Returns a violation if that is impossible. ``text`` is the override as the user wrote it.
        """
        if add:
            there = get_at(self.data, path)
            if there is MISSING:
                there = spec_at(self.spec, self.data, path).default
            if there is not MISSING and not isinstance(there, list):
                rule = f"{dotted(path)} is not a list: += adds only to lists"
                return Violation(path, value, rule, id="override", where=text)
            path = (*path, 0 if there is MISSING else len(there))
        for end, part in enumerate(path):
            rule = self._misplaced(path[:end], part)
            if rule is not None:
                rule = f"{dotted(path[:end]) or 'the run'} {rule}"
                return Violation(path[: end + 1], None, rule, id="override", where=text)
        self.data = with_parents(self.spec, self.data, path)
        above, holder = spec_at(self.spec, self.data, path[:-1]), get_at(self.data, path[:-1])
        chosen = {str(path[-1]): value}
        if isinstance(holder, Mapping) and other_kind(above, holder, chosen):
            path, value = path[:-1], chosen  # another kind replaces the whole mapping
        value = spec_at(self.spec, self.data, path).expanded(value)
        self._forget(path)
        self.data = set_at(self.data, path, value)
        origin = Origin("override", text)
        self.origins |= dict.fromkeys((leaf for leaf, _ in leaves(value, path)), origin)
        return None

    def _misplaced(self, path: FieldPath, part: PathPart) -> str | None:
        """Return why ``part`` cannot be set in the value that is at a path or will be created."""
        there = get_at(self.data, path)
        above = spec_at(self.spec, self.data, path)
        if there is MISSING or there is None or isinstance(above.expanded(there), Mapping):
            there = get_at(with_parents(self.spec, self.data, (*path, part)), path)
        if isinstance(there, list):
            if not isinstance(part, int):
                return "is a list: give the index of an item, from 0"
            many = f"has {len(there)} items, so the next index is {len(there)}"
            return many if part > len(there) else None
        if isinstance(there, Mapping):
            return "is not a list" if isinstance(part, int) else None
        return f"is a single value: it has no {part!r}"

    def _forget(self, path: FieldPath) -> None:
        """Drop the origins of everything at and below a path."""
        for leaf in [leaf for leaf in self.origins if leaf[: len(path)] == path]:
            del self.origins[leaf]
