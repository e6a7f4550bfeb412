"""The base of every configuration record.

A record is frozen, refuses unknown keys, refuses values of another type (``"1e-4"`` is not a
number) and refuses NaN and infinities. Each room keeps its own records in a ``config.py`` that
imports no torch; this file knows no field of any feature.

A field says what is legal for it alone by its type (``Annotated[int, Field(ge=1)]``); what must
hold *between* fields is said by ``rules()``, which is asked only when every field is legal.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from moefold.config.errors import FieldPath, Violation

# A run file has lists and plain strings only, so these accept them; their items stay strict.
_LENIENT = frozenset({"list", "tuple", "set", "frozenset", "enum", "lax-or-strict"})
_OPAQUE = frozenset({"metadata", "serialization", "default", "config", "cls"})


def _soften(schema: Any, handler: GetCoreSchemaHandler, top: bool = False) -> None:
    """Let containers accept lists, down to (not into) the schemas of other records."""
    if isinstance(schema, list | tuple):
        for item in schema:
            _soften(item, handler)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "definition-ref":
        target = handler.resolve_ref_schema(cast(CoreSchema, schema))
        if target.get("type") == "enum":
            _soften(target, handler)
        return
    if kind == "model" and not top:
        return
    if isinstance(kind, str) and kind in _LENIENT:
        schema["strict"] = False
    for key, item in schema.items():
        if key not in _OPAQUE:
            _soften(item, handler)


class Record(BaseModel):
    """A frozen, strict configuration record.

    ``owner`` names what is built from the record as ``"module:name"``. It is imported only when
    the record is chosen, so that configuration needs neither torch nor any optional package.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
    )

    owner: ClassVar[str | type | None] = None

    def rules(self) -> Iterator[Violation]:
        """Yield each broken relation between this record's fields, paths relative to it."""
        yield from ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build the strict schema, in which a tuple may be given as a list and a path as text."""
        schema = handler(source)
        _soften(handler.resolve_ref_schema(schema), handler, top=True)
        return schema


_SCALARS = frozenset({str, int, float, bool, type(None)})


def visit(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Record]]:
    """Yield path and record of every record at and below a value, children before parents."""
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from visit(getattr(value, name), (*path, info.alias or name))
        if isinstance(value, Record):
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from visit(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from visit(item, (*path, i))


def to_dict(value: Any) -> Any:
    """Return a record as plain data: mappings, lists and scalars, as YAML and JSON have them.

    Every field is written out, defaults too, in the order of the class. Tuples, paths and
    enumerations in it become lists and text, sets are sorted, and keys are text; what is plain
    data already comes back as a copy.
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
