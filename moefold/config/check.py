"""Judging raw data by a record class: every violation at once, each with its nearest legal value.

Relations between fields can be asked only of a record whose fields are all legal. So the judge
collects what is wrong field by field, puts the nearest legal values in, asks every record's
``rules()`` of the result, puts those nearest values in too, and goes on until nothing is left.
What it reports is therefore enough: ``repair(data, violations)`` is legal.
"""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from moefold.config.base import Record
from moefold.config.fields import (
    MISSING,
    Place,
    at,
    inside,
    leaves,
    record_at,
    slot_at,
    step,
    walk,
)
from moefold.config.nearest import candidates, closest, homes, kind_for, known_keys, words
from moefold.config.problems import REMOVE, Edit, Rename, Spot, Violation, amend, dotted, repair
from moefold.config.records import plain
from moefold.config.relations import broken_rules, others, rules_below
from moefold.config.troubles import Trouble, troubles

ROUNDS = 40
TRIALS = 150

_IDS = {
    "missing": "missing",
    "slot_missing": "missing",
    "union_tag_not_found": "missing",
    "extra_forbidden": "unknown-key",
    "slot_unknown": "unknown-name",
    "union_tag_invalid": "unknown-name",
    "literal_error": "unknown-name",
    "enum": "unknown-name",
    "finite_number": "not-finite",
    "string_pattern_mismatch": "wrong-form",
    "value_error": "refused",
    "assertion_error": "refused",
}
_RANGE = ("greater_than", "less_than", "multiple_of", "too_long", "too_short")

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Verdict(Generic[R]):
    """What the judge found: the record where all is legal, every violation, and mended data.

    ``mended`` is the data with all violations mended, and ``mended_record`` what it makes.
    """

    record: R | None
    violations: tuple[Violation, ...]
    mended: Any
    mended_record: R | None


def check(cls: type[R], data: Any) -> Verdict[R]:
    """Judge raw data (mappings, lists, scalars; records are written out) by a record class."""
    given = plain(data)
    current, found, record = deepcopy(given), [], None
    for _ in range(ROUNDS):
        record, refused = troubles(cls, current)
        if record is not None and not refused:
            broken = _relations(cls, current, record, found)
        else:
            broken = _fields(cls, current, refused)
        broken += _not_finite(current, {item.path for item in broken})
        if not broken:
            break
        for item in sorted(broken, key=_order):
            assert item.edits is not None
            current = amend(current, item.edits)
            found.append(item)
    if not found:
        return Verdict(record, (), given, record)
    return Verdict(None, tuple(_merged(cls, given, found)), current, record)


def _order(item: Violation) -> tuple[int, int]:
    """Key that puts the removal of list items last, from the end of the list."""
    gone = item.edits and item.edits[0].value == REMOVE and isinstance(item.path[-1], int)
    return (1, -int(item.path[-1])) if gone else (0, 0)


# ---------------------------------------------------------------- fields, each on its own


def _fields(cls: type[Record], data: Any, refused: Mapping[Spot, list[Trouble]]) -> list[Violation]:
    """Return a violation for each path that is refused, nearest legal values included."""
    found: list[Violation] = []
    taken: set[Spot] = set()
    for path, trouble in refused.items():
        if trouble[0].sort == "extra_forbidden":
            item = _unknown_key(cls, data, path, taken)
            found.append(item)
            if isinstance(item.nearest, Rename):
                taken.add((*path[:-1], item.nearest.to))
    for path, trouble in refused.items():
        if trouble[0].sort != "extra_forbidden" and path not in taken:
            found.append(_refused(cls, data, path, trouble))
    return found


def _unknown_key(cls: type[Record], data: Any, path: Spot, taken: set[Spot]) -> Violation:
    """Return the violation of a key that is not known: renamed where one like it is free."""
    parent, key = path[:-1], path[-1]
    place = walk(Place(cls), data, parent) or Place(cls)
    mapping, value = at(data, parent), at(data, path)
    known = known_keys(place, mapping)
    free = [name for name in known if name not in mapping and (*parent, name) not in taken]
    like = closest(key, free)
    of = dotted(parent) or "the run"
    rule = f"unknown key; {of} has {', '.join(known)}"
    if like is not None:
        nearest: Any = Rename(like)
        edits = (Edit(path, REMOVE), Edit((*parent, like), value))
    else:
        nearest, edits = REMOVE, (Edit(path, REMOVE),)
        given = closest(key, known)
        home = next(homes(Place(cls), data, str(key)), None)
        if given is not None:
            rule += f" ({given} is given already)"
        elif home is not None:
            rule += f" ({key} belongs at {dotted(home)})"
    return Violation(path, value, rule, nearest, "unknown-key", edits=edits)


def _refused(cls: type[Record], data: Any, path: Spot, trouble: list[Trouble]) -> Violation:
    """Return the violation of a value that its field refuses."""
    place = walk(Place(cls), data, path) or Place(Any)
    value = at(data, path)
    nearest = _nearest(cls, data, path, place)
    sort = _sort_of(trouble)
    if sort == "missing" and value is not MISSING:
        sort = "out-of-range"
    above = walk(Place(cls), data, path[:-1]) if path else None
    slot = None if above is None else slot_at(above)
    tag = slot is not None and path[-1] == slot.tag
    said = f"one of {', '.join(slot.kinds)}" if slot is not None and tag else words(place)
    rule = f"is required: {said}" if sort == "missing" else f"must be {said}"
    if sort == "refused":
        rule = "; ".join(dict.fromkeys(item.message for item in trouble))
    edits = (Edit(path, nearest),)
    return Violation(path, None if value is MISSING else value, rule, nearest, sort, edits=edits)


def _sort_of(trouble: list[Trouble]) -> str:
    """Return the stable id of what is wrong; in a union the most telling of the branches'."""
    ids = []
    for item in trouble:
        in_range = any(word in item.sort for word in _RANGE)
        ids.append("out-of-range" if in_range else _IDS.get(item.sort, "wrong-type"))
    telling = [name for name in ids if name != "wrong-type"]
    return telling[0] if telling else "wrong-type"


def _nearest(cls: type[Record], data: Any, path: Spot, place: Place) -> Any:
    """Return the first candidate that the field accepts in its record, else the last one made."""
    holder, base = _holder(cls, data, path)
    inner = at(data, base)
    value = at(data, path)
    tried: list[Any] = []
    for candidate in islice(_proposals(cls, data, path, place, value), TRIALS):
        if any(_same(candidate, other) for other in tried):
            continue
        tried.append(candidate)
        if not path:
            trial = candidate
        else:
            trial = amend(deepcopy(inner), [Edit(path[len(base) :], candidate)])
        _, refused = troubles(holder, trial)
        rest = path[len(base) :]
        if not any(spot[: len(rest)] == rest for spot in refused):
            return candidate
    return tried[-1] if tried else None


def _proposals(cls: type[Record], data: Any, path: Spot, place: Place, value: Any) -> Iterator[Any]:
    """Yield what to try at a path; at the tag of a slot first the kind that is likely meant."""
    parent = walk(Place(cls), data, path[:-1]) if path else None
    slot = None if parent is None else slot_at(parent)
    if parent is not None and slot is not None and path[-1] == slot.tag:
        kind = kind_for(slot, parent, at(data, path[:-1]))
        yield from [] if kind is None else [kind]
        yield from slot.kinds
    yield from candidates(place, value)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _holder(cls: type[Record], data: Any, path: Spot) -> tuple[type[Record], Spot]:
    """Return the innermost record class around a path, and where it stands."""
    place, value, best = Place(cls), data, (cls, ())
    for i, part in enumerate(path[:-1]):
        below = step(place, value, part)
        if below is None:
            break
        place, value = below, inside(value, part)
        record = None if place.union or not isinstance(value, Mapping) else record_at(place, value)
        if record is not None and issubclass(record, Record):
            best = (record, path[: i + 1])
    slot = slot_at(walk(Place(cls), data, best[1]) or Place(Any))
    if slot is not None and path[-1:] == (slot.tag,):
        return cls, ()
    return best


def _not_finite(data: Any, known: set[Spot]) -> list[Violation]:
    """Return NaN and infinities that no field looked at."""
    found = []
    for path, value in leaves(data):
        if isinstance(value, float) and not math.isfinite(value) and path not in known:
            gone = path and isinstance(path[-1], str)
            nearest = REMOVE if gone else 0.0
            rule = "must be a finite number"
            edits = (Edit(path, nearest),)
            found.append(Violation(path, value, rule, nearest, "not-finite", edits=edits))
    return found


# ---------------------------------------------------------------- relations between fields


def _relations(
    cls: type[Record], data: Any, record: Record, before: list[Violation]
) -> list[Violation]:
    """Return the rules that a record with legal fields breaks, each with edits that mend it."""
    ruled = rules_below(record)
    broken = [item for _, item in ruled]
    whole = plain(record) if broken else None
    found = []
    for spot, item in ruled:
        touched = [other.path for other in before if other.path[: len(spot)] == spot]
        if touched and item.path not in touched:
            item = replace(item, rule=f"{item.rule} (once what is said above is mended)")
        found.append(_completed(cls, data, whole, item, broken))
    return found


def _completed(
    cls: type[Record], data: Any, whole: Any, item: Violation, broken: list[Violation]
) -> Violation:
    """Return a broken rule with a nearest value that is legal there and settles the rule."""
    value = plain(item.value)
    before = sum(other.path == item.path for other in broken)
    place = walk(Place(cls), whole, item.path) or Place(Any)
    first = item.nearest if isinstance(item.nearest, Rename) else plain(item.nearest)
    fallback: Violation | None = None
    for nearest in islice(chain([first], others(place, value)), TRIALS):
        edits = _edits(data, whole, item.path, nearest)
        tried = replace(item, value=value, nearest=nearest, edits=edits)
        fallback = fallback or tried
        record, refused = troubles(cls, amend(deepcopy(data), edits))
        if record is None or refused:
            continue
        if sum(other.path == item.path for other in broken_rules(record)) < before:
            return tried
    assert fallback is not None
    return fallback


def _edits(data: Any, whole: Any, path: Spot, value: Any) -> tuple[Edit, ...]:
    """Return the change that puts ``value`` at a path of raw data.

    Where the data leaves a record on the way to its default, or names it by its bare tag, that
    record is written out, so that what it held stays.
    """
    if isinstance(value, Rename):
        renamed = (*path[:-1], value.to)
        return Edit(path, REMOVE), Edit(renamed, at(data, path))
    for i in range(1, len(path)):
        if not isinstance(at(data, path[:i]), Mapping | list):
            full = at(whole, path[:i])
            full = deepcopy(full) if isinstance(full, Mapping | list) else {}
            return (Edit(path[:i], amend(full, [Edit(path[i:], value)])),)
    return (Edit(path, value),)


def _merged(cls: type[Record], given: Any, found: list[Violation]) -> list[Violation]:
    """Return one violation per path where that mends the data just as well."""
    by_path: dict[Spot, Violation] = {}
    for item in found:
        first = by_path.get(item.path)
        if first is None:
            by_path[item.path] = item
            continue
        rules = dict.fromkeys([*first.rule.split("; "), item.rule])
        by_path[item.path] = replace(
            first, rule="; ".join(rules), nearest=item.nearest, edits=item.edits
        )
    merged = list(by_path.values())
    if len(merged) == len(found):
        return found
    record, refused = troubles(cls, repair(given, merged))
    settled = record is not None and not refused and not broken_rules(record)
    return merged if settled else found
