"""Violations: all at once, each with path, value, rule and the nearest legal value."""

import math
import pickle
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator

from moefold.config.base import Record
from moefold.config.check import broken_rules, check
from moefold.config.errors import MISSING, REMOVE, Rename, RunError, Violation, dotted
from moefold.config.fields import specs
from moefold.config.load import load
from moefold.config.slot import Slot
from moefold.config.suggest import closest
from tests.config_toys import Coach, Limits, Train, full
from tests.mutations import repair


def changed(*changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    data = full()
    for path, value in changes:
        holder: Any = data
        for part in path[:-1]:
            holder = holder[part]
        if value is REMOVE:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    return data


def said(*changes: tuple[tuple[Any, ...], Any]) -> list[tuple[str, str, Any]]:
    found = check(Train, changed(*changes)).violations
    return [(dotted(item.path), item.id, item.nearest) for item in found]


NEAREST: list[tuple[tuple[Any, ...], Any, str, Any]] = [
    (("coaches", 0, "seats"), "12", "wrong-type", 12),
    (("coaches", 0, "seats"), 12.0, "wrong-type", 12),
    (("coaches", 0, "seats"), "1_2", "wrong-type", 12),
    (("coaches", 0, "seats"), 0, "out-of-range", 1),
    (("coaches", 0, "rows"), True, "wrong-type", 1),
    (("coaches", 0, "label"), "Bar Car", "wrong-form", "coach"),
    (("coaches", 0, "label"), "a" * 20, "out-of-range", "a" * 12),
    (("engine", "litres"), "1e1", "wrong-type", 10.0),
    (("engine", "spare", "pressure"), math.nan, "not-finite", 10.0),
    (("engine", "spare", "pressure"), math.inf, "not-finite", 10.0),
    (("notes",), math.inf, "not-finite", None),
    (("engine", "litres"), -4, "out-of-range", 4.0),
    (("engine", "spare", "pressure"), 50, "out-of-range", 10.0),
    (("engine", "kind"), "Diesel ", "unknown-name", "diesel"),
    (("engine", "kind"), "disel", "unknown-name", "diesel"),
    (("engine", "kind"), 3, "unknown-name", "diesel"),
    (("engine", "kind"), REMOVE, "missing", "diesel"),
    (("wheels", 0, "spokes"), 7, "out-of-range", 8),
    (("wheels", 0, "spokes"), 100, "out-of-range", 64),
    (("wheels", 0, "spokes"), "twelve", "wrong-type", 8),
    (("wheels", 1, "bar"), 12.0, "out-of-range", 9.0),
    (("wheels", 1, "bar"), "2.5", "wrong-type", 2.5),
    (("wheels", 1), "irn", "unknown-name", {"family": "iron"}),
    (("colour",), "GREEN", "unknown-name", "green"),
    (("colour",), 3, "unknown-name", "red"),
    (("speed",), "Auto", "unknown-name", "auto"),
    (("speed",), "85", "unknown-name", 85),
    (("bell",), "yes", "wrong-type", True),
    (("bell",), "off", "wrong-type", False),
    (("bell",), 1, "wrong-type", True),
    (("gauge",), [2], "out-of-range", [2, 1.0]),
    (("gauge",), [2, 1.5, 3], "out-of-range", [2, 1.5]),
    (("coaches",), [], "out-of-range", [{"seats": 1}]),
    (("uses",), "x.py", "wrong-type", ["x.py"]),
    (("depot",), 7, "wrong-type", "7"),
    (("from",), 7, "wrong-type", "7"),
    (("load", "coal"), -1.0, "out-of-range", 0.0),
    (("load", "coal"), None, "wrong-type", 1.0),
    (("name",), REMOVE, "missing", "x"),
    (("name",), None, "wrong-type", "x"),
    (("limits",), None, "wrong-type", {"low": 0.0, "high": 1.0, "count": 3}),
    (("bel",), False, "unknown-key", REMOVE),
    (("colour",), "zzz", "unknown-name", "red"),
]


@pytest.mark.parametrize(("path", "value", "sort", "nearest"), NEAREST)
def test_nearest_legal_value(path: tuple[Any, ...], value: Any, sort: str, nearest: Any) -> None:
    data = changed((path, value))
    first = check(Train, data).violations[0]
    assert (first.path, first.id) == (path, sort)
    assert first.nearest == nearest and type(first.nearest) is type(nearest)
    assert first.rule
    assert check(Train, repair(Train, data, check(Train, data).violations)).record is not None


def test_fields_and_relations_are_told_together() -> None:
    found = said(
        (("coaches", 0, "rows"), 5),
        (("crew",), "x"),
        (("colour",), "gren"),
        (("bel",), True),
        (("bell",), REMOVE),
        (("limits", "low"), 9.0),
    )
    assert found == [
        ("bel", "unknown-key", Rename("bell")),
        ("colour", "unknown-name", "green"),
        ("crew", "wrong-type", None),
        ("coaches[0].rows", "relation", 4),
        ("limits.high", "relation", MISSING),
    ]


def test_a_misspelt_required_key_is_one_violation() -> None:
    assert said((("coaches", 0, "seats"), REMOVE), (("coaches", 0, "seat"), 12)) == [
        ("coaches[0].seat", "unknown-key", Rename("seats"))
    ]


def test_a_key_that_is_like_no_other_is_not_renamed() -> None:
    assert closest("router", ["rope", "balance", "shape"]) is None
    assert closest("batch_size", ["steps", "batch"]) == "batch"


def test_two_misspelt_keys_take_two_names() -> None:
    data = {"seats_": 4, "seat": 2, "rws": 2}
    mended = repair(Coach, data, check(Coach, data).violations)
    assert mended == {"seats": 4, "rows": 2}


def test_a_key_of_another_place_is_pointed_to() -> None:
    (item,) = check(Train, changed((("pressure",), 3.0))).violations
    assert "engine.spare.pressure" in item.rule


def test_a_rule_that_breaks_only_after_another_repair_is_told_too() -> None:
    found = said((("engine", "litres"), "0.001"))
    assert found == [("engine.litres", "wrong-type", 4.0)]
    (item,) = check(Train, changed((("engine", "litres"), "0.001"))).violations
    assert "must be a number above 0; at least half a litre per cylinder" in item.rule


def test_a_rule_without_a_nearest_value_gets_the_default_where_that_settles_it() -> None:
    data = {"low": 5.0, "high": 1.0, "count": 4}
    found = check(Limits, data).violations
    assert [(item.path, item.nearest) for item in found] == [(("high",), MISSING), (("count",), 3)]
    (item,) = check(Limits, {"high": -1.0}).violations
    assert (item.path, item.nearest) == (("high",), 1.0)


def test_a_relation_in_a_default_is_mended_where_the_data_is_silent() -> None:
    data = {"name": "x", "coaches": [{"seats": 8}], "engine": {"kind": "diesel", "litres": 0.5}}
    (item,) = check(Train, data).violations
    assert (item.path, item.nearest) == (("engine", "litres"), 2.0)
    assert repair(Train, data, [item])["engine"] == {"kind": "diesel", "litres": 2.0}


CHOICE = Slot("choice")


@CHOICE.register
class Never(Record):
    """Is never legal."""

    kind: Literal["never"] = "never"
    value: int = 0

    def rules(self) -> Iterator[Violation]:
        """There is no value that would do."""
        yield Violation(("value",), self.value, "cannot be")


@CHOICE.register
class Always(Record):
    """Is always legal."""

    kind: Literal["always"] = "always"


class Holder(Record):
    """Rules of its own lean on those of its part, and of what it derives."""

    choice: Annotated[Record, CHOICE] = Always()
    steps: Annotated[int, Field(ge=0)] = 1
    texts: tuple[str, ...] = ()

    @field_validator("texts")
    @classmethod
    def _no_empty(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if "" in texts:
            raise ValueError("a text may not be empty")
        return texts

    def rules(self) -> Iterator[Violation]:
        """Derives something that can fail."""
        if self.steps == 13:
            raise ValueError("13 steps cannot be planned")
        if self.steps == 14:
            raise ZeroDivisionError
        if isinstance(self.choice, Never):
            raise KeyError("leans on a legal choice")
        yield from ()


class Roundabout(Record):
    """Has rules whose own suggestions lead in a circle."""

    x: Annotated[int, Field(ge=0, le=3)] = 0
    y: Annotated[int, Field(ge=0, le=3)] = 0

    def rules(self) -> Iterator[Violation]:
        """Both below two is not legal; each corner points to the next."""
        following = {(0, 0): ("x", 1), (1, 0): ("y", 1), (1, 1): ("x", 0), (0, 1): ("y", 0)}
        if (self.x, self.y) in following:
            key, nearest = following[self.x, self.y]
            yield Violation((key,), getattr(self, key), "leave the corner", nearest)


def test_suggestions_that_lead_in_a_circle_are_left() -> None:
    verdict = check(Roundabout, {"x": 0})
    assert verdict.record is None and len(verdict.violations) == 2


def test_a_rule_for_which_no_value_is_known_is_told_without_one() -> None:
    (item,) = check(Holder, {"choice": {"kind": "never"}}).violations
    assert (item.path, item.rule, item.nearest) == (("choice", "value"), "cannot be", MISSING)


def test_the_article_is_that_of_the_slots_name() -> None:
    (item,) = check(Train, changed((("engine",), 5))).violations
    assert item.rule.startswith("must be an engine: a mapping with kind")


@pytest.mark.parametrize("value", ["always", {"kind": "always"}])
def test_a_kind_under_the_key_of_another_part_is_sent_to_its_own(value: Any) -> None:
    (item,) = check(Holder, {"steps": value}).violations
    assert (item.path, item.nearest) == (("steps",), Rename("choice"))
    assert item.rule.endswith("is a kind of choice")
    mended = repair(Holder, {"steps": value}, [item])
    assert mended == {"choice": value} and check(Holder, mended).record == Holder()
    (item,) = check(Holder, {"steps": value, "choice": "always"}).violations
    assert item.nearest == 1, "the part is given already"


def test_rules_may_lean_on_those_below() -> None:
    assert [item.path for item in check(Holder, {"choice": "never"}).violations] == [
        ("choice", "value")
    ]
    with pytest.raises(ZeroDivisionError):
        check(Holder, {"steps": 14})


def test_a_rule_that_raises_for_people_is_a_violation() -> None:
    (item,) = check(Holder, {"steps": 13}).violations
    assert (item.id, item.rule) == ("refused", "13 steps cannot be planned")
    assert (item.path, item.nearest) == ((), MISSING), "which of its values is to blame is unknown"


def test_validators_of_fields_are_asked_too() -> None:
    (item,) = check(Holder, {"texts": ["a", ""]}).violations
    assert (item.id, item.nearest) == ("refused", [])
    assert "may not be empty" in item.rule


def test_a_record_made_in_python_can_be_held_to_its_rules() -> None:
    assert not broken_rules(Coach(seats=4, rows=2))
    assert [item.path for item in broken_rules(Coach(seats=4, rows=3))] == [("rows",)]
    assert [item.path for item in broken_rules(Limits(low=2.0))] == [("high",)]


def test_the_error_reads_well_and_travels() -> None:
    with pytest.raises(RunError) as caught:
        load(Train, changed((("crew",), 0), (("bel",), True), (("bell",), REMOVE)))
    text = str(caught.value)
    assert text.splitlines() == [
        "train: 2 errors",
        "  bel = true  [data]",
        f"      unknown key; the run has {', '.join(specs(Train))}",
        "      nearest: rename to 'bell'",
        "  crew = 0  [data]",
        "      must be a whole number of at least 1 or null",
        "      nearest: 1",
    ]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text and again.violations == caught.value.violations
