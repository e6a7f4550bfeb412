"""Walking records: visiting every record in a tree, and turning a tree into plain data."""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from moefold.config.base import Record
from moefold.config.problems import Spot

_SCALARS = frozenset({str, int, float, bool, type(None)})


def visit(record: Record) -> Iterator[tuple[Spot, Record]]:
    """Yield path and record of every record below ``record``, children first, itself last."""
    yield from _visit(record, ())


def _visit(value: Any, path: Spot) -> Iterator[tuple[Spot, Record]]:
    if type(value) in _SCALARS:
        return
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from _visit(getattr(value, name), (*path, info.alias or name))
        if isinstance(value, Record):
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _visit(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _visit(item, (*path, i))


def plain(value: Any) -> Any:
    """Return records, tuples, sets, paths and enumerations as mappings, lists and scalars.

    Every field is written out, defaults too, in the order of the class; sets are sorted, and
    keys are text.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {info.alias or name: plain(getattr(value, name)) for name, info in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        return str(value)
    return value
