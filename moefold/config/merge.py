"""Merging of raw data from bases, a file and overrides, with the origin of each value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from moefold.config.base import Record
from moefold.config.errors import MISSING, FieldPath, PathPart, Violation, dotted
from moefold.config.fields import (
    FieldSpec,
    changes_kind,
    child_spec,
    create_parents,
    get_at,
    leaves,
    set_at,
    spec_at,
)
from moefold.config.path_tree import PathTree


@dataclass(frozen=True)
class ValueOrigin:
    """Origin of a value: its kind, and the file and line, the data's name, or the override."""

    kind: Literal["file", "given", "base", "override", "default"]
    where: str = ""
    folder: Path | None = field(default=None, compare=False)
    """Folder that file paths are relative to; None is the working folder."""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


@dataclass(frozen=True)
class ConfigLayer:
    """One source of raw data; for a file, with the line of each leaf."""

    data: Mapping[str, Any]
    kind: Literal["file", "given", "base"]
    name: str = ""
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    folder: Path | None = None

    def origin(self, path: FieldPath) -> ValueOrigin:
        """Return the origin of this layer's value at a path, with the value's first line."""
        line = self._first_lines.get(path)
        if line is None:
            around = (self.lines.get(path[:end]) for end in range(len(path)))
            line = min((number for number in around if number is not None), default=None)
        suffix = "" if line is None else f":{line}"
        return ValueOrigin(self.kind, self.name + suffix, self.folder)

    @cached_property
    def _first_lines(self) -> dict[FieldPath, int]:
        """The first line of what is at or below each path."""
        first: dict[FieldPath, int] = {}
        for leaf, line in self.lines.items():
            for end in range(len(leaf) + 1):
                path = leaf[:end]
                first[path] = min(line, first.get(path, line))
        return first


class MergedData:
    """Raw data for a record class, merged layer by layer, with the origin of each leaf.

    Mappings are merged key by key; lists and scalars are replaced. If a later layer selects
    another kind in a slot, all fields of the earlier kind are dropped.
    """

    def __init__(self, cls: type[Record]) -> None:
        self.spec = FieldSpec(cls)
        self.data: Any = {}
        self.origins: PathTree[ValueOrigin] = PathTree()

    def add(self, layer: ConfigLayer) -> None:
        """Merge a layer over the current data."""
        self.data = self._merge(self.spec, self.data, layer.data, (), layer)

    def _merge(
        self, spec: FieldSpec, base: Any, override: Any, path: FieldPath, layer: ConfigLayer
    ) -> Any:
        override = spec.with_tag(override)
        both = isinstance(override, Mapping) and isinstance(base, Mapping)
        lower: Mapping[str, Any] = base if both and not changes_kind(spec, base, override) else {}
        if not lower and base is not MISSING:
            self.origins.drop(path)
        if not isinstance(override, Mapping) or not (override or lower):
            for leaf, _ in leaves(override, path):
                self.origins[leaf] = layer.origin(leaf)
            return override
        merged = dict(lower)
        combined = {**lower, **override}
        for key, item in override.items():
            child = child_spec(spec, combined, key)
            merged[key] = self._merge(child, lower.get(key, MISSING), item, (*path, key), layer)
        return merged

    def origin(self, path: FieldPath) -> ValueOrigin:
        """Return the origin of the value at a path, or of the nearest enclosing value."""
        return self.origins.nearest(path, ValueOrigin("default"))

    def override(self, path: FieldPath, value: Any, text: str, append: bool) -> Violation | None:
        """Set the value at a path, or with ``append`` append it to the list there.

        Returns a violation if that is impossible. ``text`` is the override as written.
        """
        if append:
            current = get_at(self.data, path)
            if current is MISSING:
                current = spec_at(self.spec, self.data, path).default
            if current is not MISSING and not isinstance(current, list):
                rule = f"{dotted(path)} is not a list: += adds only to lists"
                return Violation(path, value, rule, id="override", where=text)
            path = (*path, 0 if current is MISSING else len(current))
        for end, part in enumerate(path):
            rule = self._path_error(path[:end], part)
            if rule is not None:
                rule = f"{dotted(path[:end]) or 'the run'} {rule}"
                return Violation(path[: end + 1], None, rule, id="override", where=text)
        self.data = create_parents(self.spec, self.data, path)
        parent = spec_at(self.spec, self.data, path[:-1])
        holder = get_at(self.data, path[:-1])
        tagged = {str(path[-1]): value}
        if isinstance(holder, Mapping) and changes_kind(parent, holder, tagged):
            path = path[:-1]
            value = tagged  # another kind replaces the whole mapping
        value = spec_at(self.spec, self.data, path).with_tag(value)
        self.origins.drop(path)
        self.data = set_at(self.data, path, value)
        for leaf, _ in leaves(value, path):
            self.origins[leaf] = ValueOrigin("override", text)
        return None

    def _path_error(self, path: FieldPath, part: PathPart) -> str | None:
        """Return why ``part`` cannot be set in the current or new value at a path, or None."""
        value = get_at(self.data, path)
        spec = spec_at(self.spec, self.data, path)
        if value is MISSING or value is None or isinstance(spec.with_tag(value), Mapping):
            value = get_at(create_parents(self.spec, self.data, (*path, part)), path)
        if isinstance(value, list):
            if not isinstance(part, int):
                return "is a list: give the index of an item, from 0"
            too_far = f"has {len(value)} items, so the next index is {len(value)}"
            return too_far if part > len(value) else None
        if isinstance(value, Mapping):
            return "is not a list" if isinstance(part, int) else None
        return f"is a single value: it has no {part!r}"
