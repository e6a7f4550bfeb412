"""Legal values at each path of a run file, derived from the annotations of records.

Raw data is mappings, lists and scalars as read from YAML. A ``FieldSpec`` describes the legal
values at one path; its ``options`` are the alternatives, with unions flattened. ``child_spec``
walks raw data together with its record class (for merging, overrides, suggestions, mutation).
"""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moefold.config.base import to_dict
from moefold.config.errors import MISSING, REMOVE, FieldPath, PathPart, Rename, Violation
from moefold.config.slot import Slot

_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")


@dataclass(frozen=True)
class OnDisk:
    """Marks a string field as a path of a file or folder, or as a glob pattern.

    It is relative to the folder of the run file or, in overrides, to the working folder. Text that
    begins with ``$NAME``, an environment variable of each machine, stays unchanged.
    """

    globs: bool = False

    def absolute(self, text: str, folder: Path) -> str:
        """Return the absolute form of a path relative to a folder; ``~`` is the home folder."""
        if not text or text.startswith("$") or "\0" in text:  # no path contains a NUL
            return text
        path = os.path.expanduser(text)
        matches = self.globs and glob.escape(path) != path
        if matches and not os.path.isfile(os.path.join(folder, path)):
            return os.path.join(glob.escape(str(folder)), path)
        return str(Path(folder, path))


@dataclass(frozen=True)
class Option:
    """One alternative for the value of a field.

    ``kind`` is record, slot, list, fixed, map, literal, bool, int, float, str, none or other.
    ``of`` is, by kind: the record class, the slot, the annotation of items, that of each item, that
    of values, the literals, or the type. ``bounds`` holds constraints by name.
    """

    kind: str
    of: Any = None
    bounds: Mapping[str, Any] = field(default_factory=dict)
    metadata: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FieldSpec:
    """Legal values at a path: an annotation with constraints, a default, and examples."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    default: Any = MISSING
    """Plain data; MISSING if the field is required."""
    examples: tuple[Any, ...] = ()

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Alternatives for the value, in the order of the annotation."""
        return tuple(_options(self.annotation, self.metadata))

    def option(self, *kinds: str) -> Option | None:
        """Return the first option of one of the given kinds, or None."""
        return next((option for option in self.options if option.kind in kinds), None)

    @property
    def slot(self) -> Slot | None:
        """The slot of this field, or None."""
        option = self.option("slot")
        return None if option is None else option.of

    def record_class(self, value: Any) -> type[BaseModel] | None:
        """Return the record class of a raw value of this field, or None if it is unknown."""
        for option in self.options:
            if option.kind == "record":
                return option.of
            if option.kind == "slot":
                slot: Slot = option.of
                tagged = slot.with_tag(value) if isinstance(value, Mapping) else {slot.tag: value}
                return slot.lookup(tagged.get(slot.tag))
        return None

    def with_tag(self, value: Any) -> Any:
        """Return a raw value with an explicit tag: ``muon`` becomes ``{kind: muon}``.

        A tag that a key implies is added: ``{from: ./folder}`` gets ``family: folder``.
        """
        slot = self.slot
        if slot is not None and isinstance(value, Mapping):
            return slot.with_tag(value)
        if slot is not None and isinstance(value, str) and not self.option("str", "literal"):
            return {slot.tag: value}
        return value


ANYTHING = FieldSpec(Any)


@cache
def specs(record: type[BaseModel]) -> Mapping[str, FieldSpec]:
    """Return the spec of each field of a record class, by run-file key."""
    result = {}
    for name, info in record.model_fields.items():
        default = MISSING
        if not info.is_required():
            default = to_dict(info.get_default(call_default_factory=True))
        metadata = tuple(info.metadata)
        examples = tuple(to_dict(info.examples or ()))
        result[info.alias or name] = FieldSpec(info.annotation, metadata, default, examples)
    return result


def required(record: type[BaseModel]) -> list[str]:
    """Return the keys of a record class that have no default."""
    return [key for key, spec in specs(record).items() if spec.default is MISSING]


def child_spec(spec: FieldSpec, value: Any, part: PathPart) -> FieldSpec:
    """Return the spec of key or index ``part`` of a raw value; ANYTHING if no class defines it."""
    if isinstance(part, int):
        option = spec.option("list", "fixed")
        if option is None or (option.kind == "fixed" and part >= len(option.of)):
            return ANYTHING
        return FieldSpec(option.of if option.kind == "list" else option.of[part])
    record = spec.record_class(value)
    if record is not None:
        return specs(record).get(part, ANYTHING)
    option = spec.option("map")
    return ANYTHING if option is None else FieldSpec(option.of)


def spec_at(spec: FieldSpec, value: Any, path: FieldPath) -> FieldSpec:
    """Return the spec at a path below a raw value; ANYTHING if no class defines it."""
    for part in path:
        spec = child_spec(spec, value, part)
        value = get_at(value, (part,))
    return spec


def _options(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Option]:
    origin = get_origin(annotation)
    args = get_args(annotation)
    slot = next((item for item in metadata if isinstance(item, Slot)), None)
    if origin is Annotated:
        # Flattened, as ``Field(ge=1)`` and intervals hold several constraints.
        nested = (item.metadata if isinstance(item, FieldInfo) else [item] for item in args[1:])
        yield from _options(args[0], (*chain.from_iterable(nested), *metadata))
    elif slot is not None:
        yield Option("slot", slot, metadata=metadata)
    elif origin in (Union, UnionType):
        for arg in args:
            yield from _options(arg, metadata)
    elif hidden := getattr(annotation, "__value__", getattr(annotation, "__supertype__", None)):
        yield from _options(hidden, metadata)
    else:
        named = ((name, getattr(item, name, None)) for item in metadata for name in _BOUNDS)
        bounds = {name: value for name, value in named if value is not None}
        yield replace(_plain_option(annotation, origin, args), bounds=bounds, metadata=metadata)


def _plain_option(annotation: Any, origin: Any, args: tuple[Any, ...]) -> Option:
    """Return the option of an annotation that is neither a union nor wrapped."""
    if annotation in (None, NoneType):
        return Option("none")
    if origin is Literal:
        return Option("literal", args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Option("map", args[1])
    if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        return Option("fixed", args)
    if origin in _SEQUENCES or annotation in _SEQUENCES:
        return Option("list", args[0] if args else Any)
    if annotation is dict:
        return Option("map", Any)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Option("record", annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Option("literal", tuple(item.value for item in annotation))
    if annotation in (bool, int, float, str):
        return Option(annotation.__name__, annotation)
    return Option("other", annotation)


# ------------------------------------------------------------------------------------ raw data


def get_at(value: Any, path: FieldPath) -> Any:
    """Return the value at a path of raw data, or MISSING."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part, MISSING)
        elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return MISSING
    return value


def set_at(data: Any, path: FieldPath, value: Any) -> Any:
    """Return a copy of raw data with ``value`` at a path, or without that path if it is REMOVE.

    The given data is not modified. Absent mappings on the path are created; an index one past the
    end of a list appends.
    """
    if not path:
        return value
    part = path[0]
    below = set_at(get_at(data, path[:1]), path[1:], value)
    inserted = [] if below == REMOVE else [below]
    if isinstance(data, list) and isinstance(part, int):
        return [*data[:part], *inserted, *data[part + 1 :]]
    others = data if isinstance(data, Mapping) else {}
    if inserted:
        return {**others, part: below}
    return {key: item for key, item in others.items() if key != part}


def leaves(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield path and value of each leaf of raw data; an empty list or mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and value:
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def create_parents(spec: FieldSpec, data: Any, path: FieldPath) -> Any:
    """Return raw data in which each parent of a path is a mapping or list.

    A record that the data leaves at its default, or gives as a tag only, is expanded, so that
    setting one of its values keeps the others.
    """
    for end in range(len(path)):
        value = get_at(data, path[:end])
        parent = spec_at(spec, data, path[:end])
        if isinstance(value, Mapping | list):
            continue
        value = parent.default if value is MISSING or value is None else parent.with_tag(value)
        if not isinstance(value, Mapping | list):
            value = {} if isinstance(path[end], str) else []
        data = set_at(data, path[:end], value)
    return data


def changes_kind(spec: FieldSpec, base: Mapping[str, Any], override: Mapping[str, Any]) -> bool:
    """Return whether ``override`` selects another kind than ``base``; ignores unknown kinds."""
    slot = spec.slot
    tagged = base if slot is None else slot.with_tag(base)
    if slot is None or slot.tag not in tagged or slot.lookup(override.get(slot.tag)) is None:
        return False
    return tagged[slot.tag] != override[slot.tag]


def _merge_over(spec: FieldSpec, base: Any, override: Any) -> Any:
    """Merge ``override`` over ``base`` key by key, except over another kind in a slot."""
    both = isinstance(base, Mapping) and isinstance(override, Mapping)
    if not both or changes_kind(spec, base, override):
        return override
    merged = {**base, **override}
    inner = ((key, child_spec(spec, merged, key)) for key in override)
    return merged | {key: _merge_over(child, base.get(key), override[key]) for key, child in inner}


def apply_suggestion(spec: FieldSpec, data: Any, violation: Violation) -> Any:
    """Apply a violation's suggestion to raw data."""
    path = violation.path
    nearest = violation.nearest
    if nearest is MISSING:
        return data
    if isinstance(nearest, Rename):
        renamed = (*path[:-1], nearest.to)
        nearest = get_at(data, path)
        data = set_at(data, path, REMOVE)
        path = renamed
        nearest = _merge_over(spec_at(spec, data, path), get_at(data, path), nearest)
    return set_at(create_parents(spec, data, path), path, nearest)


def iter_file_paths(spec: FieldSpec, value: Any) -> Iterator[tuple[FieldPath, str, OnDisk]]:
    """Yield field path, text and ``OnDisk`` mark of each file path in raw data."""
    for path, text in leaves(value):
        options = spec_at(spec, value, path).options if isinstance(text, str) else ()
        marks = (item for option in options for item in option.metadata)
        mark = next((item for item in marks if isinstance(item, OnDisk)), None)
        if mark is not None:
            yield path, text, mark


def basename(path: str) -> str:
    """Return the last part of a path, which survives a move of its parent folders."""
    return os.path.basename(os.path.abspath(path))
