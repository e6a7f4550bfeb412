"""What may stand at a place of a run file, read from the annotations of records.

A ``Place`` is a spot in the tree of raw data with its annotation; its ``options`` are the ways in
which it can be filled, unions flattened. Everything that walks raw data by class (merging,
overrides, suggestions, mutation in tests) goes through ``step``.
"""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moefold.config.problems import PathPart
from moefold.config.slot import Slot

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")


@dataclass(frozen=True)
class OnDisk:
    """Marks text that is a path of a file or folder, or a glob pattern of such.

    In a run file it begins at the file's folder, in overrides at the working folder. What begins
    with ``$NAME``, a value of each machine's environment, stays as it is.
    """

    globs: bool = False

    def whole(self, text: str, folder: Path) -> str:
        """Return the absolute form of what begins at a folder; ``~`` is the home."""
        if not text or text.startswith("$") or "\0" in text:  # with a zero it names nothing
            return text
        path = os.path.expanduser(text)
        matches = self.globs and glob.escape(path) != path
        if matches and not os.path.isfile(os.path.join(folder, path)):
            return os.path.join(glob.escape(str(folder)), path)
        return str(Path(folder, path))


@dataclass(frozen=True)
class Option:
    """One way in which a place can be filled.

    ``what`` is record, slot, list, fixed, map, literal, bool, int, float, str, none or other;
    ``of`` the record class, the slot, the item's annotation, the items' annotations, the values of
    the mapping's annotation, the literals, or the type. ``bounds`` holds constraints by name.
    """

    what: str
    of: Any = None
    bounds: Mapping[str, Any] = field(default_factory=dict)
    annotation: Any = None
    metadata: tuple[Any, ...] = ()

    @property
    def place(self) -> "Place":
        """The place at which this is the only option."""
        return Place(self.annotation, self.metadata)


@dataclass(frozen=True)
class Place:
    """A spot in a run file: its annotation, and the default where the field has one."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    default: Any = MISSING
    examples: tuple[Any, ...] = ()

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The ways in which this place can be filled, in the order of the annotation."""
        return tuple(_options(self.annotation, self.metadata))

    @property
    def union(self) -> bool:
        """Whether several types can stand here besides null."""
        return len([option for option in self.options if option.what != "none"]) > 1

    def option(self, *whats: str) -> Option | None:
        """Return the first option of one of the given sorts."""
        return next((option for option in self.options if option.what in whats), None)


@cache
def keys(record: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a record class by the key that a run file uses."""
    return {info.alias or name: info for name, info in record.model_fields.items()}


@cache
def places(record: type[BaseModel]) -> Mapping[str, Place]:
    """Return the place of each field of a record class by the key that a run file uses."""
    return {key: place_of(info) for key, info in keys(record).items()}


def place_of(info: FieldInfo) -> Place:
    """Return the place that a record's field is."""
    default = MISSING if info.is_required() else info.get_default(call_default_factory=True)
    return Place(info.annotation, tuple(info.metadata), default, tuple(info.examples or ()))


def step(place: Place, value: Any, part: PathPart) -> Place | None:
    """Return the place under ``part`` of the raw ``value`` that stands at ``place``."""
    if isinstance(part, int):
        option = place.option("list", "fixed")
        if option is None:
            return None
        if option.what == "list":
            return Place(option.of)
        return Place(option.of[part]) if part < len(option.of) else None
    record = record_at(place, value)
    if record is not None:
        return places(record).get(part)
    option = place.option("map")
    return None if option is None else Place(option.of)


def walk(place: Place, value: Any, path: Sequence[PathPart]) -> Place | None:
    """Return the place at the end of a path that starts at ``place``, where raw data knows one."""
    for part in path:
        below = step(place, value, part)
        if below is None:
            return None
        place, value = below, inside(value, part)
    return place


def inside(value: Any, part: PathPart) -> Any:
    """Return what stands under ``part`` of raw data, or MISSING."""
    if isinstance(value, Mapping):
        return value.get(part, MISSING)
    if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
        return value[part]
    return MISSING


def at(value: Any, path: Sequence[PathPart]) -> Any:
    """Return what stands at a path of raw data, or MISSING."""
    for part in path:
        value = inside(value, part)
    return value


def record_at(place: Place, value: Any) -> type[BaseModel] | None:
    """Return the record class that the raw value at a place stands for, if it can be told."""
    given = value if isinstance(value, Mapping) else {}
    choices: list[type[BaseModel]] = []
    for option in place.options:
        if option.what == "record":
            choices.append(option.of)
        elif option.what == "slot":
            kind = (
                value if isinstance(value, str) else option.of.completed(given).get(option.of.tag)
            )
            found = option.of.lookup(kind)
            choices += [found] if found is not None else []
    if len(choices) < 2:
        return choices[0] if choices else None
    return max(choices, key=lambda record: _likeness(record, given))


def _likeness(record: type[BaseModel], given: Mapping[str, Any]) -> tuple[int, int]:
    """How well a mapping fits a record: literals that agree, then keys known less unknown."""
    known = places(record)
    agree = sum(
        value in option.of
        for key, value in given.items()
        if key in known and isinstance(value, str)
        for option in known[key].options
        if option.what == "literal"
    )
    return agree, sum(1 if key in known else -1 for key in given)


def slot_at(place: Place) -> Slot | None:
    """Return the slot that a place offers, if it offers one."""
    option = place.option("slot")
    return None if option is None else option.of


def expanded(place: Place, value: Any) -> Any:
    """Return raw data with a tag written out: ``muon`` becomes ``{kind: muon}``.

    A tag that a key implies is put in: ``{from: ./folder}`` gets ``family: folder``.
    """
    slot = slot_at(place)
    if slot is not None and isinstance(value, Mapping):
        return slot.completed(value)
    if slot is None or not isinstance(value, str) or place.option("str", "literal"):
        return value
    return {slot.tag: value}


def leaves(value: Any, path: tuple[PathPart, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield path and value of each leaf of raw data; an empty list or mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and value:
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def paths_in(place: Place, value: Any) -> Iterator[tuple[tuple[PathPart, ...], str, OnDisk]]:
    """Yield spot, text and mark of each path of files in raw data."""
    for spot, text in leaves(value):
        found = walk(place, value, spot) if isinstance(text, str) else None
        options = () if found is None else found.options
        marks = (item for option in options for item in option.metadata)
        mark = next((item for item in marks if isinstance(item, OnDisk)), None)
        if mark is not None:
            yield spot, text, mark


def last_part(path: str) -> str:
    """Return what of a path stays when what it names is moved with the folders around it."""
    return os.path.basename(os.path.abspath(path))


def _options(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Option]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _options(args[0], (*_spread(args[1:]), *metadata))
    elif any(isinstance(item, Slot) for item in metadata):
        slot = next(item for item in metadata if isinstance(item, Slot))
        yield Option("slot", slot, annotation=annotation, metadata=metadata)
    elif origin in (Union, UnionType):
        for arg in args:
            yield from _options(arg, metadata)
    elif getattr(annotation, "__value__", None) is not None:
        yield from _options(annotation.__value__, metadata)
    elif getattr(annotation, "__supertype__", None) is not None:
        yield from _options(annotation.__supertype__, metadata)
    else:
        option = _plain(annotation, origin, args)
        bounds = _bounds(metadata)
        yield replace(option, bounds=bounds, annotation=annotation, metadata=metadata)


def _plain(annotation: Any, origin: Any, args: tuple[Any, ...]) -> Option:
    """Return the option of an annotation that is neither a union nor wrapped."""
    if annotation in (None, NoneType):
        return Option("none")
    if origin is Literal:
        return Option("literal", args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Option("map", args[1])
    if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        return Option("fixed", args)
    if origin in _SEQUENCES:
        return Option("list", args[0])
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return Option("record", annotation)
        if issubclass(annotation, Enum):
            return Option("literal", tuple(item.value for item in annotation))
        if annotation in _SEQUENCES:
            return Option("list", Any)
        if annotation is dict:
            return Option("map", Any)
        if annotation in (bool, int, float, str):
            return Option(annotation.__name__, annotation)
    return Option("other", annotation)


def _spread(metadata: Sequence[Any]) -> tuple[Any, ...]:
    """Return constraints one by one: ``Field(ge=1)`` and intervals hold several."""
    flat: list[Any] = []
    for item in metadata:
        flat += item.metadata if isinstance(item, FieldInfo) else [item]
    return tuple(flat)


def _bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        for name in _BOUNDS:
            value = getattr(item, name, None)
            if value is not None:
                found[name] = value
    return found
