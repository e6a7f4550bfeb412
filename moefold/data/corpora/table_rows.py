"""Rows of tables as the objects that were stored in them.

A table has every column, and every field of a struct, in each row: what a row lacks is null, and is
left out here. Columns of JSON text (Arrow's extension type ``arrow.json``, in which ``datasets``
stores values of several forms) are decoded, and their nulls are kept.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from moefold.data.corpora.records import BadDocument

JSON = "arrow.json"
"""Name of the extension type (Arrow's list of canonical extension types)."""
Decoder = Callable[[Any], Any]


def row_decoder(schema: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function from a batch of one row, of this schema, to the row's values.

    The function raises ``UnicodeDecodeError`` for text that is not UTF-8, and ``BadDocument`` for
    JSON that is malformed.
    """
    decoders = {field.name: _decoder(field.type, field.name) for field in schema}

    def decode(row: Any) -> dict[str, Any]:
        (values,) = row.to_pylist()
        return {k: decoders[k](value) for k, value in values.items() if value is not None}

    return decode


def _decoder(kind: Any, column: str) -> Decoder:
    """Return the function that decodes values of a type."""
    types = import_module("pyarrow").types
    if getattr(kind, "extension_name", None) == JSON:
        return partial(_parse, column)
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return partial(_struct, {field.name: _decoder(field.type, column) for field in fields})
    value_type = getattr(kind, "value_type", None)
    is_map_or_dictionary = types.is_map(kind) or types.is_dictionary(kind)
    if value_type is not None and not is_map_or_dictionary:
        return partial(_list, _decoder(value_type, column))
    return _same


def _parse(column: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = f"column {column} is of type {JSON}, but holds {text[:40]!r}: {error}"
        raise BadDocument("not JSON", detail) from error


def _struct(decoders: dict[str, Decoder], value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    return {k: decoders[k](each) for k, each in value.items() if each is not None}


def _list(decode: Decoder, values: list[Any] | None) -> Any:
    return None if values is None else [decode(each) for each in values]


def _same(value: Any) -> Any:
    return value
