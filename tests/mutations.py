"""Breaking a legal run in every place: raw data with one field wrong at a time.

``mutations`` walks raw data beside its record class and yields copies of it, each with one value
of a wrong type, out of range or misspelt, one key unknown, misspelt or missing, or one number
moved so that relations may break. ``Judge`` holds a way of loading to what is promised of it.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from moefold.config.base import Record
from moefold.config.errors import MISSING, REMOVE, FieldPath, RunError, Violation
from moefold.config.fields import (
    ANYTHING,
    FieldSpec,
    Option,
    apply_suggestion,
    child_spec,
    get_at,
    set_at,
    specs,
)
from moefold.config.suggest import minimal

SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "text": ("not-a-name", "12", "1e-4"),
    "whole": (3,),
    "number": (2.5, math.nan, math.inf),
    "truth": (True,),
    "nothing": (None,),
    "list": ([[None]],),
    "mapping": ({"no_such_key": 1},),
}
ACCEPTS: Mapping[str, frozenset[str]] = {
    "record": frozenset({"mapping"}),
    "slot": frozenset({"mapping"}),
    "list": frozenset({"list"}),
    "fixed": frozenset({"list"}),
    "map": frozenset({"mapping"}),
    "bool": frozenset({"truth"}),
    "int": frozenset({"whole"}),
    "float": frozenset({"whole", "number"}),
    "str": frozenset({"text"}),
    "none": frozenset({"nothing"}),
    "literal": frozenset(),
}
EVERYTHING = frozenset(SAMPLES)


@dataclass(frozen=True)
class Mutation:
    """Raw data with one thing changed.

    ``refused`` says whether it must be refused (a moved number may happen to be legal), and
    ``restores`` whether what is suggested must give back the data as it was.
    """

    sort: str
    path: FieldPath
    data: Any
    refused: bool = True
    restores: bool = False

    def __str__(self) -> str:
        return f"{self.sort} at {'.'.join(map(str, self.path)) or '(top)'}"


def mutations(cls: type[Record], data: Any) -> Iterator[Mutation]:
    """Yield every mutation of legal raw data for a record class."""
    for path, place, value in _places(FieldSpec(cls), data, ()):
        if path:
            yield from _wrong_types(data, path, place)
            yield from _out_of_range(data, path, place)
            yield from _misspelt(data, path, place, value)
            yield from _moved(data, path, place, value)
        record = place.record_class(value)
        if isinstance(value, Mapping) and record is not None:
            yield from _keys(data, path, specs(record), value)


def _places(
    place: FieldSpec, value: Any, path: FieldPath
) -> Iterator[tuple[FieldPath, FieldSpec, Any]]:
    yield path, place, value
    if isinstance(value, Mapping):
        parts: list[Any] = list(value)
    elif isinstance(value, list):
        parts = list(range(len(value)))
    else:
        return
    for part in parts:
        below = child_spec(place, value, part)
        if below is not ANYTHING:
            yield from _places(below, value[part], (*path, part))


def _wrong_types(data: Any, path: FieldPath, place: FieldSpec) -> Iterator[Mutation]:
    legal: frozenset[str] = frozenset()
    for option in place.options:
        text_like = option.kind == "other" and option.of is not Any
        legal |= {"text"} if text_like else ACCEPTS.get(option.kind, EVERYTHING)
    for sort, samples in SAMPLES.items():
        for sample in samples:
            not_finite = isinstance(sample, float) and not math.isfinite(sample)
            if sort not in legal or not_finite:
                yield Mutation(f"{sample!r} as type", path, set_at(data, path, sample))


def _out_of_range(data: Any, path: FieldPath, place: FieldSpec) -> Iterator[Mutation]:
    if len([option for option in place.options if option.kind != "none"]) > 1:
        return
    for option in place.options:
        for value in _beyond(option):
            yield Mutation(f"{value!r} out of range", path, set_at(data, path, value))


def _beyond(option: Option) -> Iterator[Any]:
    bounds, number = option.bounds, {"int": int, "float": float}.get(option.kind)
    if number is not None:
        for name, step_ in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if name in bounds:
                yield number(bounds[name] + step_)
                yield number(bounds[name] + step_ * 1000)
        if "multiple_of" in bounds:
            yield number(bounds["multiple_of"] * 3 + 1)
    elif option.kind == "str":
        yield from [""] if bounds.get("min_length", 0) > 0 else []
        yield from ["y" * (bounds["max_length"] + 1)] if "max_length" in bounds else []
        yield from ["\n?! bad form !?"] if "pattern" in bounds else []
    elif option.kind == "list":
        yield from [[]] if bounds.get("min_length", 0) > 0 else []


def _misspelt(data: Any, path: FieldPath, place: FieldSpec, value: Any) -> Iterator[Mutation]:
    """Misspell a name: of a literal, or the tag of a slot."""
    option = place.option("literal")
    parent = get_at(data, path[:-1])
    tag = isinstance(parent, Mapping) and isinstance(path[-1], str) and option is not None
    if not isinstance(value, str) or option is None or place.option("str"):
        return
    names = [name for name in option.of if isinstance(name, str)]
    for wrong in _typos(value):
        if wrong not in names:
            restores = tag and len(value) > 4 and len(names) == 1
            sort = f"{wrong!r} for a name"
            yield Mutation(sort, path, set_at(data, path, wrong), restores=restores)
    yield Mutation("a name far from any", path, set_at(data, path, "zzzzqqqq"))


def _typos(name: str) -> list[str]:
    if len(name) < 3:
        return [name + "q"]
    return [name[:-1], name[0] + name[2] + name[1] + name[3:] + "_", name.upper() + "S"]


def _moved(data: Any, path: FieldPath, place: FieldSpec, value: Any) -> Iterator[Mutation]:
    """Change a legal value so that a relation may break."""
    values: list[Any] = []
    if isinstance(value, bool):
        values = [not value]
    elif isinstance(value, int):
        values = [1, 2, value + 1, value * 2 + 1, max(1, value - 1), 7919, value * 1000]
    elif isinstance(value, float):
        values = [value * 10, value / 10, value + 1, 1.0]
    elif isinstance(value, list):
        values = [value[:1], value + value[-1:], value[::-1], value * 7]
    option = place.option("literal")
    values += [name for name in option.of if name != value] if option is not None else []
    slot = place.option("slot")
    if slot is not None:
        kinds = slot.of.kinds
        values += [minimal(kinds[kind], {slot.of.tag: kind}) for kind in kinds]
    for moved in values:
        if moved != value:
            sort = f"{moved!r} for a relation"
            yield Mutation(sort, path, set_at(data, path, moved), refused=False)


def _keys(data: Any, path: FieldPath, known: Mapping[str, Any], value: Any) -> Iterator[Mutation]:
    new = set_at(data, (*path, "xyzzy_no_such_key"), 1)
    yield Mutation("unknown key", (*path, "xyzzy_no_such_key"), new, restores=True)
    for key, spec in known.items():
        here = (*path, key)
        if key not in value:
            continue
        required = spec.default is MISSING
        gone = set_at(data, here, REMOVE)
        yield Mutation("missing key", here, gone, refused=required)
        if len(key) > 2:
            wrong = key[:-2] + key[-1] + key[-2]
            wrong = wrong if wrong not in known else key + "_"
            renamed = set_at(gone, (*path, wrong), value[key])
            tag = spec.option("literal") is not None and key in ("kind", "family")
            yield Mutation("misspelt key", (*path, wrong), renamed, restores=not tag)


def repair(cls: type[Record], data: Any, violations: Iterable[Violation]) -> Any:
    """Return raw data in which every suggestion is carried out, in order."""
    for violation in violations:
        data = apply_suggestion(FieldSpec(cls), data, violation)
    return data


def may_stay(violations: Iterable[Violation]) -> set[FieldPath]:
    """Return the paths at which a rule may still be broken where all suggestions are carried out.

    That is where no legal value was known (the rule names none, and the default does not settle
    it), and the wholes around a suggestion: what is said of them may be due to the value suggested,
    so it is told in the next check. And it is where two rules ask for different values of one
    field, so that what is suggested is what it holds.
    """
    told = list(violations)
    around = {item.path[:end] for item in told for end in range(len(item.path))}
    stuck = {item.path for item in told if item.nearest is MISSING or item.nearest == item.value}
    return around | stuck


class Judge:
    """Holds a way of loading to its promises, mutation by mutation."""

    def __init__(
        self, cls: type[Record], load: Callable[[Any], Any], original: Any, seconds: float = 1.0
    ) -> None:
        self.cls = cls
        self.load = load
        self.original = original
        self.seconds = seconds
        self.legal: set[str] = set()
        load(deepcopy(original))

    def __call__(self, mutation: Mutation) -> tuple[Violation, ...]:
        """Hold to its promises for one mutation.

        It is refused in time, at the path or at one that has to do with it, with a rule and a
        nearest value; and all nearest values together make it legal.
        """
        gc.disable()  # what other tests left is not this one's to collect, which takes a second
        start = time.process_time()
        try:
            self.load(deepcopy(mutation.data))
        except RunError as error:
            taken = time.process_time() - start
            gc.enable()
            self._hold(mutation, error)
            assert taken < self.seconds, f"{mutation}: refused only after {taken:.2f} s"
            return error.violations
        finally:
            gc.enable()
        assert not mutation.refused, f"{mutation}: accepted"
        return ()

    def _hold(self, mutation: Mutation, error: RunError) -> None:
        said = f"{mutation}:\n{error}"
        assert error.violations, said
        for item in error.violations:
            assert item.rule.strip() and item.id, said
            assert item.path, said
        if mutation.refused:
            size = len(mutation.path)
            paths = [item.path for item in error.violations]
            near = [path for path in paths if path[:size] == mutation.path[: len(path)]]
            assert near, f"nothing is said of the place; {said}"
        mended = repair(self.cls, error.data, error.violations)
        self._must_load(mended, may_stay(error.violations), said)
        if mutation.restores:
            assert mended == self.original, f"that does not give back the original; {said}"

    def _must_load(self, mended: Any, exempt: set[FieldPath], said: str) -> None:
        """Load mended data, unless just the same was loaded before."""
        if repr(mended) in self.legal:
            return
        try:
            self.load(deepcopy(mended))
        except RunError as again:
            left = {item.path for item in again.violations}
            assert left <= exempt, f"{said}\nmended as it says, it is refused: {again}"
        self.legal.add(repr(mended))
