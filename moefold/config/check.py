"""Check of raw data against a record class: all violations at once, each with a legal value.

Relations between fields can be checked only on a record whose fields are all legal. Where fields
are rejected, the nearest legal values are substituted and the rules run on the result; violations
found then are marked as depending on the suggested values.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from moefold.config.base import Record, to_dict, visit
from moefold.config.errors import MISSING, REMOVE, FieldPath, Remove, Rename, Violation, dotted
from moefold.config.fields import (
    ANYTHING,
    FieldSpec,
    get_at,
    leaves,
    set_at,
    spec_at,
    specs,
    with_nearest,
)
from moefold.config.suggest import candidates, closest, likely_kind, places_of_key, words

ROUNDS = 20
LIKE, MUCH_LIKE = 0.65, 0.8
"""Least similarity of a key to an unknown one: in general, and if that key is known elsewhere."""
_IDS = {
    "missing": "missing",
    "slot_missing": "missing",
    "extra_forbidden": "unknown-key",
    "slot_unknown": "unknown-name",
    "literal_error": "unknown-name",
    "enum": "unknown-name",
    "finite_number": "not-finite",
    "string_pattern_mismatch": "wrong-form",
    "value_error": "refused",
    "assertion_error": "refused",
}
"""Ids of violations by pydantic's error type; others are ``out-of-range`` or ``wrong-type``."""
_RANGES = ("greater_than", "less_than", "multiple_of", "too_long", "too_short")

R = TypeVar("R", bound=Record)
M = TypeVar("M", bound=BaseModel)
Refused = dict[FieldPath, list[tuple[str, str]]]
"""Types and messages of pydantic's errors by path in the raw data."""


@dataclass(frozen=True)
class Checked(Generic[R]):
    """Result of a check: the record, or None and every violation."""

    record: R | None
    violations: tuple[Violation, ...] = ()


def check(cls: type[R], data: Any, overrides: Collection[FieldPath] = ()) -> Checked[R]:
    """Check raw data (mappings, lists, scalars; records are converted) against a record class.

    ``overrides`` are paths of overridden leaves; a misspelt key there may mean one that is set.
    """
    data = to_dict(data)
    rounds: list[list[Violation]] = []
    for _ in range(ROUNDS):
        record, refused = validate(cls, data)
        if record is None:
            found = _refused_fields(cls, data, refused, overrides)
        else:
            found = _relations(record, data)
        fresh = [item for item in found if not any(item in known for known in rounds)]
        # List items are removed last, from the end, so that other indices stay valid.
        gone = [v for v in fresh if v.nearest == REMOVE and v.path and isinstance(v.path[-1], int)]
        fresh = [v for v in fresh if v not in gone] + sorted(gone, key=lambda v: -int(v.path[-1]))
        if not fresh:
            return Checked(None if rounds else record, tuple(_joined(rounds, data)))
        rounds.append(fresh)
        for item in fresh:
            data = with_nearest(FieldSpec(cls), data, item)
    return Checked(None, tuple(_joined(rounds, data)))


def broken_rules(record: Record) -> list[Violation]:
    """Return all violated rules of a record and of the records in it, children first.

    A record's rules may assume that its children's rules hold: where they raise while a child
    violates one, they are skipped until that is fixed.
    """
    found: list[Violation] = []
    for path, part in visit(record):
        try:
            found += [item.under(*path) for item in list(part.rules())]
        except Exception as error:
            if any(item.path[: len(path)] == path for item in found):
                continue
            if not isinstance(error, ValueError):
                raise
            found.append(Violation(path, to_dict(part), str(error), id="refused"))
    return found


def validate(record: type[M], data: Any) -> tuple[M | None, Refused]:
    """Validate raw data field by field; return the record, or pydantic's errors by path.

    Branches of unions, which pydantic includes in locations, are removed from paths. Errors of a
    value are dropped while a value inside it is rejected: a list is not too short because its
    items are invalid.
    """
    odd = [path for path, value in leaves(data) if isinstance(value, float) and not isfinite(value)]
    refused: Refused = {path: [("finite_number", "must be finite")] for path in odd}
    try:
        made = record.model_validate(data)
        return (None if refused else made), refused
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            path: FieldPath = ()  # the parts of the location that exist in raw data
            for end, part in enumerate(item["loc"], 1):
                last = item["type"] == "missing" and end == len(item["loc"])
                absent = last and isinstance(get_at(data, path), Mapping)
                if absent or get_at(data, (*path, part)) is not MISSING:
                    path = (*path, part)
            tag = item.get("ctx", {}).get("tag")
            if tag is not None and isinstance(get_at(data, path), Mapping):
                path = (*path, tag)
            refused.setdefault(path, []).append((item["type"], item["msg"]))
        parents = {path[:end] for path in refused for end in range(len(path))}
        return None, {path: said for path, said in refused.items() if path not in parents}


# ---------------------------------------------------------------------- fields, each on its own


def _refused_fields(
    cls: type[Record], data: Any, refused: Refused, overrides: Collection[FieldPath]
) -> list[Violation]:
    """Return a violation for each path that pydantic rejects."""
    above = {leaf[:end] for leaf in overrides for end in range(len(leaf) + 1)}
    found, renamed = [], set[FieldPath]()
    for path, said in refused.items():
        if said[0][0] == "extra_forbidden":
            item = _unknown_key(cls, data, path, renamed | above, path in above)
            found.append(item)
            if isinstance(item.nearest, Rename):
                renamed.add((*path[:-1], item.nearest.to))
    for path, said in refused.items():
        if said[0][0] != "extra_forbidden" and path not in renamed:
            found.append(_refused_value(cls, data, path, said))
    return found


def _unknown_key(
    cls: type[Record], data: Any, path: FieldPath, taken: set[FieldPath], replaces: bool
) -> Violation:
    """Return the violation of an unknown key, suggesting a similarly spelt key that is free.

    If it ``replaces`` a file's value, being an override, keys that the file sets are free too. A
    key that exists elsewhere needs greater similarity to be taken for a misspelling.
    """
    parent, key = path[:-1], str(path[-1])
    holder, value = get_at(data, parent), get_at(data, path)
    record = spec_at(FieldSpec(cls), data, parent).record(holder)
    known = [] if record is None else list(specs(record))
    home = next(places_of_key(FieldSpec(cls), data, key), None)
    alike = LIKE if home is None else MUCH_LIKE
    free = [name for name in known if replaces or name not in holder]
    rule = f"unknown key; {dotted(parent) or 'the run'} has {', '.join(known)}"
    like = closest(key, [name for name in free if (*parent, name) not in taken], alike)
    if like is not None:
        return Violation(path, value, rule, Rename(like), "unknown-key")
    given = closest(key, known, alike)
    if given is not None:
        rule += f" (did you mean {given}? It is already set)"
    elif home is not None:
        rule += f" ({key} belongs at {dotted(home)})"
    return Violation(path, value, rule, REMOVE, "unknown-key")


def _refused_value(
    cls: type[Record], data: Any, path: FieldPath, said: list[tuple[str, str]]
) -> Violation:
    """Return the violation of a value that its field rejects, with the nearest legal value."""
    value, spec = get_at(data, path), spec_at(FieldSpec(cls), data, path)
    above = spec_at(FieldSpec(cls), data, path[:-1]) if path else ANYTHING
    slot = above.slot
    if slot is not None and path[-1] == slot.tag:
        likely = likely_kind(above, slot, get_at(data, path[:-1]))
        legal, tried = f"one of {', '.join(slot.kinds)}", iter((likely, *slot.kinds))
    else:
        legal, tried = words(spec), candidates(spec, value)
    sort = _id_of([kind for kind, _ in said])
    if sort == "missing" and value is not MISSING:
        sort = "out-of-range"  # a list that is too short
    rule = f"is required: {legal}" if sort == "missing" else f"must be {legal}"
    if sort == "refused":
        rule = "; ".join(dict.fromkeys(message for _, message in said))
    elif sort == "not-finite":
        rule = "must be a finite number" if spec.annotation is Any else f"must be finite: {legal}"
    beside = _slot_beside(above, get_at(data, path[:-1]), value)
    if beside is not None:
        rule += f"; {value if isinstance(value, str) else 'it'} is a kind of {beside}"
        return Violation(path, value, rule, Rename(beside), sort)
    nearest: Any = MISSING
    for item in tried:  # accepted if this field is legal, whatever is wrong elsewhere
        others = validate(cls, set_at(data, path, item))[1]
        if not any(other[: len(path)] == path for other in others):
            nearest = item
            break
    return Violation(path, None if value is MISSING else value, rule, nearest, sort)


def _slot_beside(above: FieldSpec, holder: Any, value: Any) -> str | None:
    """Return an unset key of the record whose slot has the rejected value as a kind, or None."""
    record = above.record(holder)
    known = {} if record is None else specs(record)
    for name, spec in known.items():
        slot = spec.slot
        if slot is not None and name not in holder:
            kind = value.get(slot.tag) if isinstance(value, Mapping) else value
            if isinstance(kind, str) and kind in slot.kinds:
                return name
    return None


def _id_of(kinds: list[str]) -> str:
    """Return the violation id for pydantic's error types, of which a union has one per branch."""
    for kind in kinds:
        if any(word in kind for word in _RANGES):
            return "out-of-range"
        if kind in _IDS:
            return _IDS[kind]
    return "wrong-type"


# --------------------------------------------------------------------- relations between fields


def _relations(record: Record, data: Any) -> Iterator[Violation]:
    """Yield violated rules of a record with legal fields, each with a legal value.

    Where a rule suggests no value, null or the default is suggested if it satisfies the rule.
    """
    for item in broken_rules(record):
        spec = spec_at(FieldSpec(type(record)), to_dict(record), item.path)
        given, tried = item.nearest, list[Any]()
        if given is MISSING or (given is None and not spec.option("none")):
            given, tried = MISSING, [None, spec.default]
        if not isinstance(given, Rename):
            given = to_dict(given)
        item = replace(item, value=to_dict(item.value), nearest=given)
        for nearest in tried:
            mended = with_nearest(FieldSpec(type(record)), data, replace(item, nearest=nearest))
            fixed, _ = validate(type(record), mended)
            if fixed is not None and not any(b.path == item.path for b in broken_rules(fixed)):
                item = replace(item, nearest=nearest)
                break
        yield item


def _joined(rounds: list[list[Violation]], fixed: Any) -> list[Violation]:
    """Return all violations, merging those of a suggested value into the one that suggested it.

    Each of ``rounds`` was found after the earlier ones were fixed; in ``fixed`` all are fixed.
    """
    kept: list[Violation] = []
    for fresh in rounds:
        earlier = {item.path[:-1] for item in kept}
        around = {path[:end] for path in earlier for end in range(len(path) + 1)}
        for item in fresh:
            # Violations whose suggestion provided the value at this path.
            put = [i for i, above in enumerate(kept) if above.path == item.path[: len(above.path)]]
            given = (i for i in put if not isinstance(kept[i].nearest, Remove | Rename))
            i = next(given, None)
            if i is not None:
                above, nearest = kept[i], get_at(fixed, kept[i].path)
                both = above.path == item.path and item.rule not in above.rule.split("; ")
                rule = f"{above.rule}; {item.rule}" if both else above.rule
                nearest = REMOVE if nearest is MISSING else nearest
                kept[i] = replace(above, rule=rule, nearest=nearest)
            elif item.path in around:
                continue  # the cause may be the suggested values inside this value
            elif item.path[:-1] in earlier:
                note = "(with the values suggested above)"
                kept.append(replace(item, rule=f"{item.rule} {note}"))
            else:
                kept.append(item)
    return kept
