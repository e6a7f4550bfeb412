"""Judging raw data by a record class: every violation at once, each with its nearest legal value.

Relations between fields can be asked only of a record whose fields are all legal. So the judge
collects what is wrong field by field, puts the nearest legal values in, asks every record's
``rules()`` of the result, puts those nearest values in too, and goes on until nothing is left.
What it reports is therefore enough: ``repair(data, violations)`` is legal.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
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
from moefold.config.problems import (
    REMOVE,
    Edit,
    Rename,
    Spot,
    Violation,
    amend,
    copied,
    dotted,
    repair,
)
from moefold.config.records import plain
from moefold.config.relations import broken_rules, others, rules_below
from moefold.config.slot import Slot
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
    judge = _Judge(cls, copied(given))
    record: R | None = None
    for _ in range(ROUNDS):
        record, refused = troubles(cls, judge.data)
        broken = judge.relations(record) if record is not None else judge.fields(refused)
        broken += judge.not_finite({item.path for item in broken})
        if not broken:
            break
        judge.mend(broken)
    if not judge.found:
        return Verdict(record, (), given, record)
    return Verdict(None, tuple(_merged(cls, given, judge.found)), judge.data, record)


class _Judge:
    """One judgement under way: the data as mended so far, and what was found wrong with it."""

    def __init__(self, cls: type[Record], data: Any) -> None:
        self.cls = cls
        self.data = data
        self.found: list[Violation] = []

    def mend(self, broken: list[Violation]) -> None:
        """Put in the nearest values of a round; items of lists go last, from the end."""
        for item in sorted(broken, key=_order):
            assert item.edits is not None
            self.data = amend(self.data, item.edits)
            self.found.append(item)

    def place(self, path: Spot) -> Place:
        """Return the place at a path; anything may stand where no class knows it."""
        return walk(Place(self.cls), self.data, path) or Place(Any)

    def suggested(self, path: Spot, value: Any) -> bool:
        """Whether a value was suggested for a path in an earlier round."""
        return any(item.path == path and _same(item.nearest, value) for item in self.found)

    # ------------------------------------------------------------ fields, each on its own

    def fields(self, refused: Mapping[Spot, list[Trouble]]) -> list[Violation]:
        """Return a violation for each path that is refused, nearest legal values included."""
        found: list[Violation] = []
        taken: set[Spot] = set()
        for path, trouble in refused.items():
            if trouble[0].sort == "extra_forbidden":
                item = self._unknown_key(path, taken)
                found.append(item)
                if isinstance(item.nearest, Rename):
                    taken.add((*path[:-1], item.nearest.to))
        for path, trouble in refused.items():
            if trouble[0].sort != "extra_forbidden" and path not in taken:
                found.append(self._refused(path, trouble))
        return found

    def not_finite(self, known: set[Spot]) -> list[Violation]:
        """Return NaN and infinities that no field looked at."""
        found = []
        for path, value in leaves(self.data):
            if not isinstance(value, float) or math.isfinite(value):
                continue
            if not any(path[:end] in known for end in range(len(path) + 1)):
                gone = path and isinstance(path[-1], str)
                nearest = REMOVE if gone else 0.0
                rule = "must be a finite number"
                edits = (Edit(path, nearest),)
                found.append(Violation(path, value, rule, nearest, "not-finite", edits=edits))
        return found

    def _unknown_key(self, path: Spot, taken: set[Spot]) -> Violation:
        """Return the violation of a key that is not known: renamed where one like it is free."""
        parent, key = path[:-1], path[-1]
        mapping, value = at(self.data, parent), at(self.data, path)
        known = known_keys(self.place(parent), mapping)
        free = [name for name in known if name not in mapping and (*parent, name) not in taken]
        like = closest(key, free)
        rule = f"unknown key; {dotted(parent) or 'the run'} has {', '.join(known)}"
        if like is not None:
            edits = (Edit(path, REMOVE), Edit((*parent, like), value))
            return Violation(path, value, rule, Rename(like), "unknown-key", edits=edits)
        given = closest(key, known)
        home = next(homes(Place(self.cls), self.data, str(key)), None)
        if given is not None:
            rule += f" ({given} is given already)"
        elif home is not None:
            rule += f" ({key} belongs at {dotted(home)})"
        return Violation(path, value, rule, REMOVE, "unknown-key", edits=(Edit(path, REMOVE),))

    def _refused(self, path: Spot, trouble: list[Trouble]) -> Violation:
        """Return the violation of a value that its field refuses."""
        value = at(self.data, path)
        nearest = self._nearest(path)
        sort = _sort_of(trouble)
        if sort == "missing" and value is not MISSING:
            sort = "out-of-range"
        slot = self._tagged(path)
        said = words(self.place(path)) if slot is None else f"one of {', '.join(slot.kinds)}"
        rule = f"is required: {said}" if sort == "missing" else f"must be {said}"
        if sort == "refused":
            rule = "; ".join(dict.fromkeys(item.message for item in trouble))
        shown = None if value is MISSING else value
        return Violation(path, shown, rule, nearest, sort, edits=(Edit(path, nearest),))

    def _tagged(self, path: Spot) -> Slot | None:
        """Return the slot whose tag stands at a path, if one's does."""
        slot = slot_at(self.place(path[:-1])) if path else None
        return slot if slot is not None and path[-1] == slot.tag else None

    def _nearest(self, path: Spot) -> Any:
        """Return the first candidate that the field accepts, and that was not suggested before.

        A whole part is made up rather than near to anything, so there one that also keeps every
        rule is preferred.
        """
        holder, base = self._holder(path)
        inner, rest = at(self.data, base), path[len(base) :]
        made_up = self.place(path).option("slot", "record") is not None
        tried: list[Any] = []
        legal: list[Any] = []
        for candidate in islice(self._proposals(path), TRIALS):
            if any(_same(candidate, other) for other in tried):
                continue
            tried.append(candidate)
            _, refused = troubles(holder, amend(copied(inner), [Edit(rest, candidate)]))
            if any(spot[: len(rest)] == rest for spot in refused):
                continue
            legal.append(candidate)
            if self.suggested(path, candidate):
                continue
            if not made_up or self._keeps_rules(path, candidate):
                return candidate
        fresh = [item for item in legal if not self.suggested(path, item)]
        return next(iter([*fresh, *legal, *tried]), None)

    def _proposals(self, path: Spot) -> Iterator[Any]:
        """Yield what to try at a path; at the tag of a slot first the kind that is likely meant."""
        slot = self._tagged(path)
        if slot is not None:
            kind = kind_for(slot, self.place(path[:-1]), at(self.data, path[:-1]))
            yield from [] if kind is None else [kind]
            yield from slot.kinds
        yield from candidates(self.place(path), at(self.data, path))

    def _keeps_rules(self, path: Spot, value: Any) -> bool:
        """Whether a run with ``value`` at a path is legal in every way."""
        record, _ = troubles(self.cls, amend(copied(self.data), [Edit(path, value)]))
        return record is not None and not broken_rules(record)

    def _holder(self, path: Spot) -> tuple[type[Record], Spot]:
        """Return the innermost record class around a path, and where it stands."""
        if self._tagged(path) is not None:
            return self.cls, ()
        place, value, best = Place(self.cls), self.data, (self.cls, ())
        for i, part in enumerate(path[:-1]):
            below = step(place, value, part)
            if below is None:
                break
            place, value = below, inside(value, part)
            known = None if place.union else record_at(place, value)
            if known is not None and isinstance(value, Mapping) and issubclass(known, Record):
                best = (known, path[: i + 1])
        return best

    # ------------------------------------------------------------ relations between fields

    def relations(self, record: Record) -> list[Violation]:
        """Return the rules that a record with legal fields breaks, each with edits that mend it."""
        ruled = rules_below(record)
        broken = [item for _, item in ruled]
        whole = plain(record) if broken else None
        found = []
        for spot, item in ruled:
            touched = [other.path for other in self.found if other.path[: len(spot)] == spot]
            if touched and item.path not in touched:
                item = replace(item, rule=f"{item.rule} (once what is said above is mended)")
            found.append(self._completed(whole, item, broken))
        return found

    def _completed(self, whole: Any, item: Violation, broken: list[Violation]) -> Violation:
        """Return a broken rule with a nearest value that is legal there and settles the rule.

        Where no value at the rule's own path does, what is around it is replaced.
        """
        value = plain(item.value)
        count = sum(other.path == item.path for other in broken)
        fallback: Violation | None = None
        for spot, nearest in self._attempts(whole, item):
            edits = _edits(self.data, whole, spot, nearest)
            tried = replace(item, value=value, nearest=nearest, edits=edits)
            if spot != item.path:
                rule = f"{dotted(item.path)}: {item.rule}"
                tried = replace(tried, path=spot, value=at(whole, spot), rule=rule)
            fallback = fallback or tried
            if self.suggested(spot, nearest):
                continue
            record, _ = troubles(self.cls, amend(copied(self.data), edits))
            if record is None:
                continue
            if sum(other.path == item.path for other in broken_rules(record)) < count:
                return tried
        assert fallback is not None
        return fallback

    def _attempts(self, whole: Any, item: Violation) -> Iterator[tuple[Spot, Any]]:
        """Yield what may settle a rule: its own nearest, others at its path, then around it."""
        own = item.nearest if isinstance(item.nearest, Rename) else plain(item.nearest)
        yield item.path, own
        for end in range(len(item.path), -1, -1):
            spot = item.path[:end]
            place = walk(Place(self.cls), whole, spot) or Place(Any)
            for nearest in islice(others(place, at(whole, spot)), TRIALS):
                yield spot, nearest


def _order(item: Violation) -> tuple[int, int]:
    """Key that puts the removal of list items last, from the end of the list."""
    gone = item.edits and item.edits[0].value == REMOVE and isinstance(item.path[-1], int)
    return (1, -int(item.path[-1])) if gone else (0, 0)


def _sort_of(trouble: list[Trouble]) -> str:
    """Return the stable id of what is wrong; in a union the most telling of the branches'."""
    ids = []
    for item in trouble:
        in_range = any(word in item.sort for word in _RANGE)
        ids.append("out-of-range" if in_range else _IDS.get(item.sort, "wrong-type"))
    telling = [name for name in ids if name != "wrong-type"]
    return telling[0] if telling else "wrong-type"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


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
            full = copied(full) if isinstance(full, Mapping | list) else {}
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
