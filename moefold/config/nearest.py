"""What is legal at a place, in words, and the legal values nearest to one that is not."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from moefold.config.fields import (
    MISSING,
    Option,
    Place,
    keys,
    places,
    record_at,
)
from moefold.config.problems import show
from moefold.config.records import plain
from moefold.config.slot import Slot
from moefold.config.troubles import troubles

_YES = ("true", "yes", "on", "y", "1")
_NO = ("false", "no", "off", "n", "0")


def words(place: Place) -> str:
    """Return what may stand at a place: ``a whole number of at least 1, or null``."""
    # An example says more to a person than a pattern does.
    hidden = ("pattern",) if place.examples else ()
    said = [_words(option, hidden) for option in place.options]
    example = f", such as {show(plain(place.examples[0]))}" if place.examples else ""
    return (" or ".join(dict.fromkeys(said)) or "nothing") + example


def _words(option: Option, hidden: Sequence[str] = ()) -> str:
    return _NAMES[option.what](option) + _bound_words(option, hidden)


def _bound_words(option: Option, hidden: Sequence[str]) -> str:
    """Return the constraints of an option, but the hidden ones, with a space before them."""
    bounds = {name: bound for name, bound in option.bounds.items() if name not in hidden}
    unit = {"str": "characters", "list": "items"}.get(option.what, "items")
    parts = []
    if "ge" in bounds and "le" in bounds:
        parts.append(f"from {bounds.pop('ge')} to {bounds.pop('le')}")
    said = {
        "ge": "of at least {}",
        "gt": "above {}",
        "le": "of at most {}",
        "lt": "below {}",
        "multiple_of": "a multiple of {}",
        "min_length": f"of at least {{}} {unit}",
        "max_length": f"of at most {{}} {unit}",
        "pattern": "of the form {}",
    }
    parts += [said[name].format(bounds[name]) for name in said if name in bounds]
    parts = [re.sub(r"\b1 (item|character)s$", r"1 \1", part) for part in parts]
    return " " + " and ".join(parts) if parts else ""


def _listed(names: Iterable[Any], most: int = 24) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


def _of_items(annotations: Iterable[Any]) -> str:
    """Return what the items of a list are, where that is short to say."""
    places = [Place(item) for item in annotations]
    if any(place.option("record", "slot", "other", "list") for place in places):
        return ""
    return f" ({', '.join(words(place) for place in places)})"


_NAMES = {
    "record": lambda option: f"a mapping with the keys {_listed(keys(option.of))}",
    "slot": lambda option: (
        f"a {option.of.name}: a mapping with {option.of.tag}, one of {_listed(option.of.kinds)}"
    ),
    "list": lambda option: "a list" + _of_items([option.of]),
    "fixed": lambda option: f"a list of {len(option.of)}" + _of_items(option.of),
    "map": lambda option: "a mapping",
    "literal": lambda option: f"one of {_listed(option.of)}",
    "bool": lambda option: "true or false",
    "int": lambda option: "a whole number",
    "float": lambda option: "a number",
    "str": lambda option: "text",
    "none": lambda option: "null",
    "other": lambda option: getattr(option.of, "__name__", "a value").lower(),
}


def closest(name: Any, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the name most like ``name`` in spelling, if any is like it."""
    known = list(names)
    folded = {_fold(item): item for item in reversed(known)}
    if _fold(name) in folded:
        return folded[_fold(name)]
    found = difflib.get_close_matches(_fold(name), list(folded), 1, cutoff)
    return folded[found[0]] if found else None


def _fold(name: Any) -> str:
    return str(name).strip().lower().replace("-", "_").replace(" ", "_")


def kind_for(slot: Slot, place: Place, value: Any) -> str | None:
    """Return the kind that raw data at a slot most likely means.

    That is the one closest in spelling, else the one that refuses least of what is given, else
    the kind of the default, else the one that needs least.
    """
    given = value if isinstance(value, Mapping) else {}
    named = given.get(slot.tag, value)
    if isinstance(named, str):
        found = closest(named, slot.kinds)
        if found is not None:
            return found
    if any(key != slot.tag for key in given):
        refused = {
            kind: len(troubles(record, {**given, slot.tag: kind})[1])
            for kind, record in slot.kinds.items()
        }
        best = min(refused, key=lambda kind: refused[kind], default=None)
        if best is not None and refused[best] < len(given) - (slot.tag in given):
            return best
    default = plain(place.default) if place.default is not MISSING else None
    if isinstance(default, Mapping) and default.get(slot.tag) in slot.kinds:
        return default[slot.tag]
    return min(slot.kinds, key=lambda kind: _needs(slot.kinds[kind]), default=None)


def candidates(place: Place, value: Any) -> Iterator[Any]:
    """Yield values that may be legal at ``place``, the nearest to ``value`` first.

    First what the value can be read as, then the bounds it lies beyond, then the default, then
    what can be made up from the annotation. Whether one is legal is for the caller to try.
    """
    for option in place.options:
        yield from _near(option, value)
    if place.default is not MISSING:
        yield plain(place.default)
    yield from (plain(item) for item in place.examples)
    for option in place.options:
        if option.what == "slot":
            yield from _kinds(option.of, place, value)
        yield from _ordinary(option)
    for option in place.options:
        yield made_up(option)


def _kinds(slot: Slot, place: Place, value: Any) -> Iterator[Any]:
    """Yield each kind with no more than it needs, the one that is likely meant first."""
    likely = kind_for(slot, place, value)
    by_needs = sorted(slot.kinds, key=lambda kind: (kind != likely, _needs(slot.kinds[kind])))
    for kind in by_needs:
        yield made_up(Option("record", slot.kinds[kind]), {slot.tag: kind})


def _near(option: Option, value: Any) -> Iterator[Any]:
    """Yield ``value`` read as the option's type, and moved inside its bounds."""
    if option.what in ("int", "float"):
        number = _number(value)
        if number is not None:
            yield from _moved(option, number)
    elif option.what == "bool":
        word = str(value).strip().lower()
        yield from [True] * (word in _YES) + [False] * (word in _NO)
    elif option.what == "literal":
        yield from _like(option.of, value)
    elif option.what in ("str", "other") and not isinstance(value, list | Mapping):
        if value is not None and value is not MISSING:
            yield from _as_text(option, str(value).strip())
    elif option.what in ("list", "fixed") and value is not MISSING:
        yield from _as_list(option, value)
    elif option.what == "record" and isinstance(value, Mapping):
        yield value
    elif option.what == "slot" and isinstance(value, str):
        kind = closest(value, option.of.kinds)
        yield from [] if kind is None else [{option.of.tag: kind}]


def _number(value: Any) -> int | float | None:
    """Return the number that a value can be read as: ``"1e-4"``, ``"1_000"``, ``"4"``."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value) if isinstance(value, str | float) else value
        if isinstance(value, str) and number.is_integer() and not set(value) & set(".eE"):
            number = int(value)
    except ValueError:
        return None
    finite = isinstance(number, int | float) and math.isfinite(number)
    return number if finite else None


def _moved(option: Option, number: int | float) -> Iterator[int | float]:
    """Yield a number as the option's type, inside its bounds and on its multiples."""
    whole = option.what == "int"
    bounds = option.bounds
    low, high = bounds.get("ge"), bounds.get("le")
    if "gt" in bounds:
        low = math.floor(bounds["gt"]) + 1 if whole else None
        if not whole and number <= bounds["gt"] and bounds.get("lt") is not None:
            yield (bounds["gt"] + bounds["lt"]) / 2
    if "lt" in bounds:
        high = math.ceil(bounds["lt"]) - 1 if whole else None
    inside = round(number) if whole else float(number)
    if low is not None:
        inside = max(inside, math.ceil(low) if whole else float(low))
    if high is not None:
        inside = min(inside, math.floor(high) if whole else float(high))
    step = bounds.get("multiple_of")
    if step:
        yield from (type(inside)(step * round(inside / step + d)) for d in (0, 1, -1))
    yield inside


def _like(literals: tuple[Any, ...], value: Any) -> Iterator[Any]:
    found = closest(value, [item for item in literals if isinstance(item, str)])
    if found is not None:
        yield found
    number = _number(value)
    numbers = [item for item in literals if _number(item) is not None]
    if number is not None and numbers:
        yield min(numbers, key=lambda item: abs(item - number))


def _as_text(option: Option, text: str) -> Iterator[str]:
    """Yield text as it is, cut or filled to its length, and rid of what its form forbids."""
    yield text
    least, most = option.bounds.get("min_length", 0), option.bounds.get("max_length")
    yield text[:most].ljust(least, "x")
    pattern = option.bounds.get("pattern")
    if pattern is not None:
        parts = re.split(r"[\s,;]+|(?<=\d)(?=[a-z])", text)
        yield " ".join(part for part in parts if re.search(pattern, part))
        yield re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _as_list(option: Option, value: Any) -> Iterator[Any]:
    """Yield a list made of the value: itself alone, cut to length, or filled up."""
    items = value if isinstance(value, list) else [value]
    yield items
    if option.what == "fixed":
        yield [*items[: len(option.of)], *(made_up_at(Place(of)) for of in option.of[len(items) :])]
        return
    most, least = option.bounds.get("max_length"), option.bounds.get("min_length", 0)
    yield items[:most]
    if len(items) < least:
        yield [*items, *[made_up_at(Place(option.of))] * (least - len(items))]


def _ordinary(option: Option) -> Iterator[Any]:
    """Yield values that are ordinary for a type, inside its bounds."""
    if option.what == "literal":
        yield from option.of
    elif option.what == "bool":
        yield False
    elif option.what in ("int", "float"):
        for number in (1, 0, -1):
            yield from _moved(option, number)
        if option.what == "float":
            low = option.bounds.get("gt", option.bounds.get("ge", -math.inf))
            high = option.bounds.get("lt", option.bounds.get("le", math.inf))
            if math.isfinite(low) and math.isfinite(high):
                yield (low + high) / 2
            yield from [math.nextafter(low, math.inf)] if math.isfinite(low) else []
            yield from [math.nextafter(high, -math.inf)] if math.isfinite(high) else []


def made_up_at(place: Place) -> Any:
    """Return a plain value for a place that has none: its default, an example, or made up."""
    if place.default is not MISSING:
        return plain(place.default)
    if place.examples:
        return plain(place.examples[0])
    options = sorted(place.options, key=lambda option: option.what == "none")
    return made_up(options[0]) if options else None


def made_up(option: Option, given: Mapping[str, Any] | None = None) -> Any:
    """Return a plain value of an option's type, holding no more than it needs."""
    if option.what == "record":
        return _made_up_record(option.of, dict(given or {}))
    if option.what == "slot":
        slot: Slot = option.of
        simplest = min(slot.kinds, key=lambda kind: _needs(slot.kinds[kind]), default=None)
        if simplest is None:
            return None
        return _made_up_record(slot.kinds[simplest], {slot.tag: simplest})
    if option.what == "list":
        return [made_up_at(Place(option.of))] * option.bounds.get("min_length", 0)
    if option.what == "fixed":
        return [made_up_at(Place(of)) for of in option.of]
    if option.what == "map":
        return {}
    if option.what in ("str", "other"):
        return "x" * max(1, option.bounds.get("min_length", 1))
    return next(_ordinary(option), None)


def _needs(record: type[BaseModel]) -> int:
    return sum(info.is_required() for info in keys(record).values())


def _made_up_record(record: type[BaseModel], found: dict[str, Any]) -> dict[str, Any]:
    for key, info in keys(record).items():
        if info.is_required() and key not in found:
            found[key] = made_up_at(places(record)[key])
    return found


def known_keys(place: Place, value: Any) -> list[str]:
    """Return the keys that a mapping at ``place`` may hold, in the order of the class."""
    record = record_at(place, value)
    return [] if record is None else list(keys(record))


def homes(place: Place, value: Any, key: str) -> Iterator[tuple[str, ...]]:
    """Yield where else below ``place`` a key is known, given the raw data there."""
    record = record_at(place, value)
    if record is None or not isinstance(value, Mapping):
        return
    for name, below in places(record).items():
        if name == key:
            yield (name,)
        inner = value.get(name, plain(below.default) if below.default is not MISSING else {})
        for path in homes(below, inner, key):
            yield (name, *path)
