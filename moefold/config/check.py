"""Validation of raw data against a record class: all violations at once, with legal values.

Constraints between fields can be checked only if every field is legal. Rejected fields are
therefore replaced by the nearest legal values before the rules run; violations found then are
marked as depending on the suggested values.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from moefold.config.base import Record, iter_records, to_dict
from moefold.config.errors import (
    MAX_LISTED,
    MISSING,
    REMOVE,
    FieldPath,
    Remove,
    Rename,
    Violation,
    dotted,
)
from moefold.config.fields import (
    ANYTHING,
    FieldSpec,
    apply_suggestion,
    get_at,
    leaves,
    set_at,
    spec_at,
    specs,
)
from moefold.config.suggest import candidates, closest, describe, find_key, likely_kind

MAX_ROUNDS = 20
MIN_SIMILARITY = 0.65
MIN_SIMILARITY_ELSEWHERE = 0.8
"""Minimum similarity of a suggested key: in general, and if the unknown key exists elsewhere."""
_VIOLATION_IDS = {
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
"""Violation ids by pydantic's error type; others are ``out-of-range`` or ``wrong-type``."""
_RANGE_ERRORS = ("greater_than", "less_than", "multiple_of", "too_long", "too_short")

R = TypeVar("R", bound=Record)
M = TypeVar("M", bound=BaseModel)
PydanticErrors = dict[FieldPath, list[tuple[str, str]]]
"""Types and messages of pydantic's errors, by path in the raw data."""


@dataclass(frozen=True)
class CheckResult(Generic[R]):
    """Result of a check: the record, or None and the violations, of which some are only counted."""

    record: R | None
    violations: tuple[Violation, ...] = ()
    unlisted: int = 0


def check(cls: type[R], data: Any, overrides: Collection[FieldPath] = ()) -> CheckResult[R]:
    """Check raw data (mappings, lists, scalars; records are converted) against a record class.

    ``overrides`` are paths of overridden leaves: a misspelt key there may mean one that is set.
    """
    data = to_dict(data)
    rounds: list[list[Violation]] = []
    for _ in range(MAX_ROUNDS):
        record, errors = validate(cls, data)
        unlisted = 0
        if record is None:
            unlisted = max(len(errors) - MAX_LISTED, 0)
            listed = dict(islice(errors.items(), MAX_LISTED))
            data = _without(data, set(islice(errors, MAX_LISTED, None)), _prefixes(listed))
            violations = _field_violations(cls, data, listed, overrides)
        else:
            broken = broken_rules(record)
            unlisted = max(len(broken) - MAX_LISTED, 0)
            violations = _rule_violations(record, broken[:MAX_LISTED], data)
        if unlisted:  # too much is wrong for what depends on the suggestions to be of use
            rounds.append(list(violations))
            return CheckResult(None, tuple(_merge_rounds(rounds, data)), unlisted)
        fresh = [item for item in violations if not any(item in earlier for earlier in rounds)]
        # Remove list items last and from the end, so that other indices stay valid.
        drops = [v for v in fresh if v.nearest == REMOVE and v.path and isinstance(v.path[-1], int)]
        fresh = [v for v in fresh if v not in drops] + sorted(drops, key=lambda v: -int(v.path[-1]))
        if not fresh:
            return CheckResult(None if rounds else record, tuple(_merge_rounds(rounds, data)))
        rounds.append(fresh)
        for item in fresh:
            data = apply_suggestion(FieldSpec(cls), data, item)
    return CheckResult(None, tuple(_merge_rounds(rounds, data)))


def broken_rules(record: Record) -> list[Violation]:
    """Return all violated rules of a record and of the records in it, children first.

    A record's rules may assume that its children's rules hold: if they raise while a child
    violates one, they are skipped until that is fixed.
    """
    violations: list[Violation] = []
    for path, inner in iter_records(record):
        try:
            violations += [item.under(*path) for item in list(inner.rules())]
        except Exception as error:
            if any(item.path[: len(path)] == path for item in violations):
                continue
            if not isinstance(error, ValueError):
                raise
            violations.append(Violation(path, to_dict(inner), str(error), id="refused"))
    return violations


def validate(record: type[M], data: Any) -> tuple[M | None, PydanticErrors]:
    """Validate raw data field by field; return the record, or pydantic's errors by path.

    Union branches, which pydantic includes in locations, are removed from paths. Errors of a value
    are dropped if one inside it is rejected: a list with invalid items is not also too short.
    """
    bad = [path for path, value in leaves(data) if isinstance(value, float) and not isfinite(value)]
    errors: PydanticErrors = {path: [("finite_number", "must be finite")] for path in bad}
    try:
        result = record.model_validate(data)
        return (None if errors else result), errors
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
            errors.setdefault(path, []).append((item["type"], item["msg"]))
        parents = {path[:end] for path in errors for end in range(len(path))}
        return None, {path: items for path, items in errors.items() if path not in parents}


def _prefixes(paths: Iterable[FieldPath]) -> set[FieldPath]:
    """Return the paths, and each path around them."""
    return {path[:end] for path in paths for end in range(len(path) + 1)}


def _without(data: Any, removed: set[FieldPath], kept: set[FieldPath]) -> Any:
    """Return raw data without the values at ``removed`` paths.

    A list ends before the first item at or below which something is removed, unless that item is
    among the ``kept`` paths.
    """
    around = _prefixes(removed)

    def copy(value: Any, path: FieldPath) -> Any:
        if path not in around:
            return value
        if isinstance(value, Mapping):
            present = {key: item for key, item in value.items() if (*path, key) not in removed}
            return {key: copy(item, (*path, key)) for key, item in present.items()}
        if isinstance(value, list):
            cut = (i for i in range(len(value)) if (*path, i) in around and (*path, i) not in kept)
            items = enumerate(value[: next(cut, len(value))])
            return [copy(item, (*path, i)) for i, item in items]
        return value

    return copy(data, ()) if removed else data


# --------------------------------------------------------------------------- individual fields


def _field_violations(
    cls: type[Record], data: Any, errors: PydanticErrors, overrides: Collection[FieldPath]
) -> list[Violation]:
    """Return a violation for each path with pydantic errors."""
    parents = {leaf[:end] for leaf in overrides for end in range(len(leaf) + 1)}
    violations = []
    renamed = set[FieldPath]()
    for path, items in errors.items():
        if items[0][0] == "extra_forbidden":
            item = _unknown_key_violation(cls, data, path, renamed | parents, path in parents)
            violations.append(item)
            if isinstance(item.nearest, Rename):
                renamed.add((*path[:-1], item.nearest.to))
    for path, items in errors.items():
        if items[0][0] != "extra_forbidden" and path not in renamed:
            violations.append(_value_violation(cls, data, path, items))
    return violations


def _unknown_key_violation(
    cls: type[Record], data: Any, path: FieldPath, taken: set[FieldPath], replaces: bool
) -> Violation:
    """Return the violation of an unknown key, suggesting a similarly spelt unset key.

    If it ``replaces`` a file's value, because it is an override, set keys are suggested too. A key
    that exists elsewhere must be more similar to count as a misspelling.
    """
    parent = path[:-1]
    key = str(path[-1])
    holder = get_at(data, parent)
    value = get_at(data, path)
    record = spec_at(FieldSpec(cls), data, parent).record_class(holder)
    keys = [] if record is None else list(specs(record))
    elsewhere = next(find_key(FieldSpec(cls), data, key), None)
    cutoff = MIN_SIMILARITY if elsewhere is None else MIN_SIMILARITY_ELSEWHERE
    free = [name for name in keys if replaces or name not in holder]
    rule = f"unknown key; {dotted(parent) or 'the run'} has {', '.join(keys)}"
    suggestion = closest(key, [name for name in free if (*parent, name) not in taken], cutoff)
    if suggestion is not None:
        return Violation(path, value, rule, Rename(suggestion), "unknown-key")
    already_set = closest(key, keys, cutoff)
    if already_set is not None:
        rule += f" (did you mean {already_set}? It is already set)"
    elif elsewhere is not None:
        rule += f" ({key} belongs at {dotted(elsewhere)})"
    return Violation(path, value, rule, REMOVE, "unknown-key")


def _value_violation(
    cls: type[Record], data: Any, path: FieldPath, errors: list[tuple[str, str]]
) -> Violation:
    """Return the violation of a value that its field rejects, with the nearest legal value."""
    value = get_at(data, path)
    spec = spec_at(FieldSpec(cls), data, path)
    parent = spec_at(FieldSpec(cls), data, path[:-1]) if path else ANYTHING
    slot = parent.slot
    if slot is not None and path[-1] == slot.tag:
        likely = likely_kind(parent, slot, get_at(data, path[:-1]))
        legal = f"one of {', '.join(slot.kinds)}"
        attempts = iter((likely, *slot.kinds))
    else:
        legal = describe(spec, value)
        attempts = candidates(spec, value)
    violation_id = _violation_id([kind for kind, _ in errors])
    if violation_id == "missing" and value is not MISSING:
        violation_id = "out-of-range"  # a list that is too short
    rule = f"is required: {legal}" if violation_id == "missing" else f"must be {legal}"
    if violation_id == "refused":
        rule = "; ".join(dict.fromkeys(message for _, message in errors))
    elif violation_id == "not-finite":
        rule = "must be a finite number" if spec.annotation is Any else f"must be finite: {legal}"
    sibling = _sibling_slot(parent, get_at(data, path[:-1]), value)
    if sibling is not None:
        rule += f"; {value if isinstance(value, str) else 'it'} is a kind of {sibling}"
        return Violation(path, value, rule, Rename(sibling), violation_id)
    nearest: Any = MISSING
    for item in attempts:  # accept if this field is legal, whatever is wrong elsewhere
        others = validate(cls, set_at(data, path, item))[1]
        if not any(error_path[: len(path)] == path for error_path in others):
            nearest = item
            break
    return Violation(path, None if value is MISSING else value, rule, nearest, violation_id)


def _sibling_slot(parent: FieldSpec, holder: Any, value: Any) -> str | None:
    """Return an unset key of the record whose slot has the rejected value as a kind, or None."""
    record = parent.record_class(holder)
    record_specs = {} if record is None else specs(record)
    for name, spec in record_specs.items():
        slot = spec.slot
        if slot is not None and name not in holder:
            kind = value.get(slot.tag) if isinstance(value, Mapping) else value
            if isinstance(kind, str) and kind in slot.kinds:
                return name
    return None


def _violation_id(kinds: list[str]) -> str:
    """Return the violation id for pydantic's error types; a union has one per branch."""
    for kind in kinds:
        if any(word in kind for word in _RANGE_ERRORS):
            return "out-of-range"
        if kind in _VIOLATION_IDS:
            return _VIOLATION_IDS[kind]
    return "wrong-type"


# ------------------------------------------------------------------- constraints between fields


def _rule_violations(record: Record, broken: Sequence[Violation], data: Any) -> Iterator[Violation]:
    """Yield the violated rules of a record with legal fields, each with a legal value.

    If a rule suggests no value, null or the default is suggested if it satisfies the rule.
    """
    plain = to_dict(record)
    for item in broken:
        spec = spec_at(FieldSpec(type(record)), plain, item.path)
        suggestion = item.nearest
        attempts = list[Any]()
        if suggestion is MISSING or (suggestion is None and not spec.option("none")):
            suggestion = MISSING
            attempts = [None, spec.default]
        if not isinstance(suggestion, Rename):
            suggestion = to_dict(suggestion)
        item = replace(item, value=to_dict(item.value), nearest=suggestion)
        for nearest in attempts:
            new = apply_suggestion(FieldSpec(type(record)), data, replace(item, nearest=nearest))
            fixed, _ = validate(type(record), new)
            if fixed is not None and not any(b.path == item.path for b in broken_rules(fixed)):
                item = replace(item, nearest=nearest)
                break
        yield item


def _merge_rounds(rounds: list[list[Violation]], fixed: Any) -> list[Violation]:
    """Return all violations, merging those of a suggested value into the one that suggested it.

    Each of ``rounds`` was found after fixing the earlier ones; ``fixed`` has no violations.
    """
    merged: list[Violation] = []
    for fresh in rounds:
        earlier = {item.path[:-1] for item in merged}
        around = {path[:end] for path in earlier for end in range(len(path) + 1)}
        for item in fresh:
            # Violations whose suggestion set the value at this path.
            sources = [i for i, v in enumerate(merged) if v.path == item.path[: len(v.path)]]
            with_value = (i for i in sources if not isinstance(merged[i].nearest, Remove | Rename))
            i = next(with_value, None)
            if i is not None:
                above = merged[i]
                nearest = get_at(fixed, merged[i].path)
                both = above.path == item.path and item.rule not in above.rule.split("; ")
                rule = f"{above.rule}; {item.rule}" if both else above.rule
                nearest = REMOVE if nearest is MISSING else nearest
                merged[i] = replace(above, rule=rule, nearest=nearest)
            elif item.path in around:
                continue  # suggested values inside this one may be the cause
            elif item.path[:-1] in earlier:
                note = "(with the values suggested above)"
                merged.append(replace(item, rule=f"{item.rule} {note}"))
            else:
                merged.append(item)
    return merged
