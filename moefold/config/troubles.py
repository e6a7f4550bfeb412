"""What pydantic refuses in raw data, placed where it stands in the run file.

Pydantic's error locations name the branches of unions besides keys and indices, and it reports
every branch. Here each error gets the path in the data, and only the branch that the data means
is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from moefold.config.fields import Place, inside, record_at, slot_at, step
from moefold.config.problems import PathPart, Spot

_TAG = ("slot_missing", "slot_unknown", "union_tag_not_found", "union_tag_invalid")

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Trouble:
    """One thing that a field refuses: the sort as pydantic names it, and its message."""

    sort: str
    message: str


def troubles(record: type[M], data: Any) -> tuple[M | None, dict[Spot, list[Trouble]]]:
    """Validate raw data field by field; return the record, or what is refused, by path."""
    try:
        return record.model_validate(data), {}
    except ValidationError as error:
        found: dict[Spot, list[Trouble]] = {}
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        for item in errors:
            path = _locate(Place(record), data, item["loc"])
            if path is None:
                continue
            trouble = Trouble(item["type"], item["msg"])
            if trouble.sort in _TAG:
                path = _tag_path(Place(record), data, path)
            found.setdefault(path, []).append(trouble)
        first = errors[0]
        return None, _deepest(found) or {(): [Trouble(first["type"], first["msg"])]}


def _deepest(found: dict[Spot, list[Trouble]]) -> dict[Spot, list[Trouble]]:
    """Drop what is said of a place while something inside it is wrong.

    Pydantic finds a list too short where its items are refused, and a value of no other type of a
    union than the one whose inside is refused.
    """
    inner = {path[:end] for path in found for end in range(len(path))}
    return {path: said for path, said in found.items() if path not in inner}


def _locate(place: Place, value: Any, loc: Sequence[PathPart]) -> Spot | None:
    """Return the path in the data that a location means, None for a branch that is not meant."""
    path: Spot = ()
    rest = list(loc)
    while rest:
        if place.union:
            narrowed = _branch(place, value, str(rest.pop(0)))
            if narrowed is None:
                return None
            place = narrowed
            continue
        part = rest.pop(0)
        if part == "[key]":
            continue
        if isinstance(part, int) and isinstance(value, list) and part >= len(value):
            break  # a list that is too short is wrong as a whole
        below = step(place, value, part)
        path, value = (*path, part), inside(value, part)
        place = Place(Any) if below is None else below
    return path


def _branch(place: Place, value: Any, label: str) -> Place | None:
    """Return the branch of a union that a label names, None where the data means another."""
    options = [option for option in place.options if option.what != "none"]
    if isinstance(value, Mapping):
        record = record_at(place, value)
        tags = [item for item in value.values() if isinstance(item, str)]
        if record is not None and label in (record.__name__, *tags):
            return Place(record)
        slots = [option for option in options if option.what == "slot"]
        if slots and label.startswith("function"):
            return slots[0].place
        maps = [option for option in options if option.what == "map"]
        if maps and label.startswith("dict"):
            return maps[0].place
        return None if record is not None or slots or maps else Place(Any)
    lists = [option for option in options if option.what in ("list", "fixed")]
    if isinstance(value, list) and lists and label.startswith(("list", "tuple", "set", "froz")):
        return lists[0].place
    return Place(Any)


def _tag_path(place: Place, data: Any, path: Spot) -> Spot:
    """Return the path of the tag of the choice at ``path``; a bare tag stands there itself."""
    value = data
    for part in path:
        below = step(place, value, part)
        value = inside(value, part)
        if below is None:
            return path
        place = below
    slot = slot_at(place)
    if not isinstance(value, Mapping):
        return path
    return (*path, slot.tag if slot is not None else "kind")
