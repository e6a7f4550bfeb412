"""A run in the making: layers of raw data merged by class, each leaf with where it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moefold.config.base import Record
from moefold.config.fields import (
    MISSING,
    Place,
    at,
    expanded,
    leaves,
    slot_at,
    step,
    walk,
)
from moefold.config.problems import REMOVE, Edit, PathPart, Spot, Violation, amend, copied, dotted
from moefold.config.records import plain
from moefold.config.slot import Slot


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a sort, and the file and line, the name of data, or the override."""

    sort: Literal["file", "given", "base", "override", "default"]
    where: str = ""
    folder: Path | None = field(default=None, compare=False)
    """Where its paths of files begin; None is the working folder."""

    def __str__(self) -> str:
        return f"{self.sort} {self.where}".strip()


@dataclass(frozen=True)
class Layer:
    """One source of raw data: what it says, and the line of each leaf where it is a file."""

    data: Mapping[str, Any]
    sort: Literal["file", "given", "base"]
    name: str = ""
    lines: Mapping[Spot, int] | None = None
    folder: Path | None = None

    def origin(self, path: Spot) -> Origin:
        """Return where what this layer has at a path begins."""
        lines = self.lines or {}
        below = [line for leaf, line in lines.items() if leaf[: len(path)] == path]
        around = [lines[path[:end]] for end in range(len(path)) if path[:end] in lines]
        if below or around:
            return Origin(self.sort, f"{self.name}:{min(below or around)}", self.folder)
        return Origin(self.sort, self.name, self.folder)


class Draft:
    """Raw data for a record class, built up layer by layer.

    Mappings merge key by key, lists and scalars replace. Where a later layer chooses another kind
    in a slot, the earlier choice goes as a whole: its knobs belong to another part.
    """

    def __init__(self, cls: type[Record]) -> None:
        self.place = Place(cls)
        self.data: Any = {}
        self.origins: dict[Spot, Origin] = {}

    def lay(self, layer: Layer) -> None:
        """Merge a layer over what is there."""
        self.data = self._merge(self.place, self.data, layer.data, (), layer)

    def _merge(self, place: Place, under: Any, over: Any, path: Spot, layer: Layer) -> Any:
        over = expanded(place, over)
        if isinstance(under, Mapping) and isinstance(over, Mapping) and over:
            if not _other_kind(place, under, over):
                merged = dict(under)
                for key, item in over.items():
                    below = step(place, {**under, **over}, key) or Place(Any)
                    there = merged.get(key, MISSING)
                    merged[key] = self._merge(below, there, item, (*path, key), layer)
                return merged
        elif isinstance(under, Mapping) and isinstance(over, Mapping):
            return under
        if under is not MISSING:
            self._forget(path)
        if isinstance(over, Mapping) and over:
            items = {
                key: self._merge(
                    step(place, over, key) or Place(Any), MISSING, item, (*path, key), layer
                )
                for key, item in over.items()
            }
            return items
        for leaf, _ in leaves(over, path):
            self.origins[leaf] = layer.origin(leaf)
        return copied(over)

    def origin(self, path: Spot) -> Origin:
        """Return where what stands at a path came from, or else what stands around it."""
        for end in range(len(path), 0, -1):
            inner = (origin for leaf, origin in self.origins.items() if leaf[:end] == path[:end])
            first = next(inner, None)
            if first is not None:
                return first
        return Origin("default")

    def put(self, path: Spot, value: Any, where: str) -> Violation | None:
        """Set one value by its path, as an override does; return what is wrong with the path.

        On the way, a record left to its default and a bare tag are written out.
        """
        origin = Origin("override", where)
        if not path:
            return Violation((), value, "an override needs a key", REMOVE, "override", where, ())
        for i in range(1, len(path)):
            path = self._spelt(path, i - 1)
            problem = self._open(path[:i], path[i], where)
            if problem is not None:
                return problem
        path = self._spelt(path, len(path) - 1)
        holder = at(self.data, path[:-1])
        problem = _enterable(holder, path[-1], path, where)
        if problem is not None:
            return problem
        above = walk(self.place, self.data, path[:-1])
        slot = None if above is None else slot_at(above)
        if slot is not None and path[-1] == slot.tag and _changes(slot, holder, value):
            path, value = path[:-1], {slot.tag: value}
        here = walk(self.place, self.data, path) or Place(Any)
        value = expanded(here, value)
        self._forget(path)
        self.data = amend(self.data, [Edit(path, value)])
        for leaf, _ in leaves(value, path):
            self.origins[leaf] = origin
        return None

    def append(self, path: Spot, value: Any, where: str) -> Violation | None:
        """Add one value at the end of the list at a path, as ``key+=value`` does."""
        there = at(self.data, path)
        if there is MISSING:
            there = self._default(path)
        if there is not MISSING and not isinstance(there, list):
            rule = f"{dotted(path)} is no list, so nothing can be added to it"
            return Violation(path, value, rule, None, "override", where, ())
        if at(self.data, path) is MISSING:
            problem = self.put(path, there if there is not MISSING else [], where)
            if problem is not None:
                return problem
            self._forget(path)
        return self.put((*path, len(at(self.data, path))), value, where)

    def _spelt(self, path: Spot, i: int) -> Spot:
        """Return the path with its part ``i`` as text where a mapping's key is meant."""
        if isinstance(at(self.data, path[:i]), Mapping):
            return (*path[:i], str(path[i]), *path[i + 1 :])
        return path

    def _default(self, path: Spot) -> Any:
        place = walk(self.place, self.data, path)
        return MISSING if place is None or place.default is MISSING else plain(place.default)

    def _open(self, path: Spot, following: PathPart, where: str) -> Violation | None:
        """Make sure that something with parts stands at a path."""
        there = at(self.data, path)
        if isinstance(there, Mapping | list):
            return _enterable(there, following, (*path, following), where)
        place = walk(self.place, self.data, path) or Place(Any)
        if isinstance(there, str) and isinstance(expanded(place, there), Mapping):
            self.data = amend(self.data, [Edit(path, expanded(place, there))])
            slot = slot_at(place)
            assert slot is not None
            self.origins[(*path, slot.tag)] = self.origins.pop(path, Origin("override", where))
            return None
        if there is not MISSING and there is not None:
            rule = f"{dotted(path)} is a single value, so {dotted((*path, following))} is nothing"
            return Violation((*path, following), there, rule, None, "override", where, ())
        fresh = self._default(path)
        if not isinstance(fresh, Mapping | list):
            fresh = {} if isinstance(following, str) else []
        problem = _enterable(fresh, following, (*path, following), where)
        if problem is None:
            self._forget(path)
            self.data = amend(self.data, [Edit(path, fresh)])
        return problem

    def _forget(self, path: Spot) -> None:
        """Drop the origins of everything at and below a path."""
        for leaf in [leaf for leaf in self.origins if leaf[: len(path)] == path]:
            del self.origins[leaf]


def _other_kind(place: Place, under: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    slot = slot_at(place)
    if slot is None or slot.tag not in slot.completed(under):
        return False
    return _changes(slot, slot.completed(under), over.get(slot.tag))


def _changes(slot: Slot, under: Mapping[str, Any], kind: Any) -> bool:
    """Whether a tag chooses another kind; a misspelt one may mean the same."""
    return slot.lookup(kind) is not None and under.get(slot.tag) != kind


def _enterable(holder: Any, part: PathPart, path: Spot, where: str) -> Violation | None:
    """Return what is wrong with taking ``part`` of a mapping or list."""
    if isinstance(holder, list):
        if not isinstance(part, int):
            rule = f"{dotted(path[:-1])} is a list: name an item by its number, from 0"
        elif part > len(holder):
            rule = f"{dotted(path[:-1])} has length {len(holder)}, so the next is {len(holder)}"
        else:
            return None
    elif isinstance(part, int):
        rule = f"{dotted(path[:-1])} is not a list"
    else:
        return None
    return Violation(path, None, rule, None, "override", where, ())
