"""Base class of all configuration records.

A record is frozen and rejects unknown keys, values of another type (``"1e-4"`` is not a number),
NaN and infinities. Each package defines its records in a ``config.py`` that imports no torch; this
file knows no field of any feature.

A field's type defines its legal values (``Annotated[int, Field(ge=1)]``). Constraints *between*
fields are checked by ``rules()``, which is called only when every field is legal.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from moefold.config.errors import FieldPath, Violation

# Types that accept lists and plain strings, as YAML has no others; items stay strict.
_LENIENT = frozenset({"list", "tuple", "set", "frozenset", "enum", "lax-or-strict"})
MOST: dict[str, Any] = {"int": 2**31 - 1, "float": 1e30}
"""Bounds of the magnitude of numbers in fields that state none of their own."""
_OPAQUE = frozenset({"metadata", "serialization", "default", "config", "cls"})


def _adapt(schema: Any, handler: GetCoreSchemaHandler, top: bool = False) -> None:
    """Let a core schema's containers accept lists, and bound its numbers.

    Nested schemas of other records stay as they are.
    """
    if isinstance(schema, list | tuple):
        for item in schema:
            _adapt(item, handler)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if isinstance(kind, str) and kind in MOST:
        for inclusive, exclusive, bound in (("le", "lt", MOST[kind]), ("ge", "gt", -MOST[kind])):
            if inclusive not in schema and exclusive not in schema:
                schema[inclusive] = bound
    if kind == "definition-ref":
        target = handler.resolve_ref_schema(cast(CoreSchema, schema))
        if target.get("type") == "enum":
            _adapt(target, handler)
        return
    if kind == "model" and not top:
        return
    if isinstance(kind, str) and kind in _LENIENT:
        schema["strict"] = False
    for key, item in schema.items():
        if key not in _OPAQUE:
            _adapt(item, handler)


class Record(BaseModel):
    """A frozen, strict configuration record; every number in it is bounded.

    ``owner`` is the class that is built from the record, as ``"module:name"``. It is imported only
    when it is built, so that configuration needs neither torch nor optional packages.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
    )

    owner: ClassVar[str | type | None] = None
    preloads: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import and that each rank of a run with this record needs."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, for which cached properties are computed anew."""
        copied = super().model_copy(update=update, deep=deep)
        values = vars(copied)
        for name in values.keys() - type(self).model_fields.keys():
            del values[name]
        return copied

    def rules(self) -> Iterator[Violation]:
        """Yield violated constraints between this record's fields, with paths relative to it."""
        yield from ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build the strict schema, which accepts lists for tuples and strings for paths."""
        schema = handler(source)
        _adapt(handler.resolve_ref_schema(schema), handler, top=True)
        return schema


_SCALARS = frozenset({str, int, float, bool, type(None)})


def iter_records(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Record]]:
    """Yield the path and record of every record in a value, children before parents."""
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from iter_records(getattr(value, name), (*path, info.alias or name))
        if isinstance(value, Record):
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from iter_records(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from iter_records(item, (*path, i))


def without_defaults(value: Any, always: Collection[str] = ()) -> Any:
    """Convert a record to plain data as :func:`to_dict`, without fields that have their default.

    ``always`` are fields of the record that remain; so do the kinds of records in slots.
    """
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {
            info.alias or name: without_defaults(getattr(value, name))
            for name, info in fields
            if name in ("kind", *always)
            or getattr(value, name) != info.get_default(call_default_factory=True)
        }
    if isinstance(value, list | tuple):
        return [without_defaults(item) for item in value]
    return to_dict(value)


def to_dict(value: Any) -> Any:
    """Convert a record to plain data: mappings, lists and scalars, as in YAML and JSON.

    All fields are included, defaults too, in class order. Tuples and sets become lists (sets
    sorted), paths and keys strings, and enumerations their values. Plain data is copied.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {info.alias or name: to_dict(getattr(value, name)) for name, info in fields}
    if isinstance(value, Mapping):
        return {str(key): to_dict(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((to_dict(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, Enum):
        return to_dict(value.value)
    if isinstance(value, PurePath):
        return str(value)
    return value
