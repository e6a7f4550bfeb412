"""Records as sorted lines ``path: value``: golden dumps of recipes, and what differs."""

import json
from collections.abc import Mapping
from typing import Any

from moefold.config.base import Record, to_dict
from moefold.config.errors import MISSING, dotted
from moefold.config.fields import leaves


def flat(record: Record | Mapping[str, Any]) -> dict[str, str]:
    """Return each leaf of a record by its dotted path, values as JSON."""
    return {
        dotted(path): json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
        for path, value in leaves(to_dict(record))
    }


def golden(record: Record | Mapping[str, Any]) -> str:
    """Return a record as sorted lines ``path: value``, for a dump that is kept and compared."""
    lines = sorted(flat(record).items(), key=lambda item: _natural(item[0]))
    return "".join(f"{path}: {value}\n" for path, value in lines)


def _natural(path: str) -> list[tuple[int, int, str]]:
    """Sort key in which item 10 of a list comes after item 9."""
    parts = path.replace("]", "").replace("[", ".").split(".")
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def diff(one: Record | Mapping[str, Any], other: Record | Mapping[str, Any]) -> list[str]:
    """Return what differs between two records, a line per leaf: ``path: old -> new``."""
    old, new = flat(one), flat(other)
    paths = sorted({*old, *new}, key=_natural)
    absent = repr(MISSING)
    return [
        f"{path}: {old.get(path, '(nothing)')} -> {new.get(path, '(nothing)')}"
        for path in paths
        if old.get(path, absent) != new.get(path, absent)
    ]
