"""Descriptions of a field's legal values, and the legal values nearest to an illegal one."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from pydantic import BaseModel

from moefold.config.base import MOST
from moefold.config.errors import MISSING, FieldPath, format_value
from moefold.config.fields import FieldSpec, Option, required, specs
from moefold.config.slot import Slot

_BOOL_SPELLINGS = {
    **dict.fromkeys(("true", "yes", "on", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "0"), False),
}
_NULL_SPELLINGS = ("false", "no", "off", "none")
"""Spellings that may mean null."""
_KIND_TEXTS = {
    "list": "a list",
    "map": "a mapping",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "none": "null",
}
_BOUND_TEXTS = {
    "ge": "of at least {}",
    "gt": "above {}",
    "le": "of at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "min_length": "of at least {} {unit}",
    "max_length": "of at most {} {unit}",
    "pattern": "that matches {}",
}


# ------------------------------------------------------------------------------- descriptions


def describe(spec: FieldSpec, value: Any = None) -> str:
    """Describe a field's legal values: ``a whole number of at least 1 or null``.

    A bound that all fields have is named if the rejected ``value`` is beyond it.
    """
    number = _number(value)
    for option in spec.options:
        most = MOST.get(option.kind)
        free = not {"le", "lt"} & set(option.bounds)
        if most is not None and number is not None and number > most and free:
            shown = f"{most:,}" if option.kind == "int" else f"{most:g}"
            return f"{_KIND_TEXTS[option.kind]} of at most {shown}"
    # An example is clearer than a pattern.
    hidden = ("pattern",) if spec.examples else ()
    texts = dict.fromkeys(_describe_option(option, hidden) for option in spec.options)
    has_pattern = any("pattern" in option.bounds for option in spec.options)
    lead = " of the form" if has_pattern else ", such as"
    example = f"{lead} {format_value(spec.examples[0])}" if spec.examples else ""
    return " or ".join(texts) + example


def _describe_option(option: Option, hidden: tuple[str, ...]) -> str:
    if option.kind == "record":
        text = f"a mapping with the keys {_join_names(specs(option.of))}"
    elif option.kind == "slot":
        noun = f"a{'n' * (option.of.name[0] in 'aeiou')} {option.of.name}"
        text = f"{noun}: a mapping with {option.of.tag}, one of {_join_names(option.of.kinds)}"
    elif option.kind == "fixed":
        items = ", ".join(describe(FieldSpec(hint)) for hint in option.of)
        text = f"a list of {len(option.of)} ({items})"
    elif option.kind == "literal":
        text = f"one of {_join_names(option.of)}"
    else:
        text = _KIND_TEXTS.get(option.kind) or getattr(option.of, "__name__", "a value").lower()
    if option.kind == "list" and not FieldSpec(option.of).option("record", "slot", "other", "list"):
        text += f" ({describe(FieldSpec(option.of))})"
    bounds = {name: bound for name, bound in option.bounds.items() if name not in hidden}
    unit = "characters" if option.kind == "str" else "items"
    bound_texts = [_BOUND_TEXTS[name].format(bound, unit=unit) for name, bound in bounds.items()]
    text = " ".join([text, " and ".join(bound_texts)]).rstrip()
    return re.sub(r"\b1 (item|character)s\b", r"1 \1", text)


def _join_names(names: Iterable[Any], most: int = 24) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


# -------------------------------------------------------------------------------------- names


def closest(name: Any, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the most similarly spelt name, or None if none reaches ``cutoff``."""
    folded = {_normalise(item): item for item in reversed(list(names))}
    matches = difflib.get_close_matches(_normalise(name), list(folded), 1, cutoff)
    return folded[matches[0]] if matches else None


def _normalise(name: Any) -> str:
    return str(name).strip().lower().replace("-", "_").replace(" ", "_")


def likely_kind(spec: FieldSpec, slot: Slot, value: Any) -> str | None:
    """Return the kind of a slot that a raw value most likely means.

    This is the kind closest in spelling, else the one that has most of the value's keys; ties go to
    the default's kind, then to the kind with the fewest required fields.
    """
    data = value if isinstance(value, Mapping) else {}
    spelling = closest(data.get(slot.tag, value), slot.kinds)
    if spelling is not None:
        return spelling
    default = spec.default.get(slot.tag) if isinstance(spec.default, Mapping) else None

    def rank(kind: str) -> tuple[int, bool, int]:
        record = slot.kinds[kind]
        stated = data.keys() & specs(record).keys()
        return -len(stated), kind != default, len(required(record))

    return min(slot.kinds, key=rank, default=None)


def find_key(spec: FieldSpec, value: Any, key: str) -> Iterator[FieldPath]:
    """Yield each path below a raw value, defaults included, where ``key`` is a field."""
    record = spec.record_class(value)
    if record is None or not isinstance(value, Mapping):
        return
    for name, below in specs(record).items():
        if name == key:
            yield (name,)
        for path in find_key(below, value.get(name, below.default), key):
            yield (name, *path)


# ------------------------------------------------------------------------------------- values


def candidates(spec: FieldSpec, value: Any) -> Iterator[Any]:
    """Yield values that may be legal in a field, nearest to ``value`` first.

    These are conversions of the value, clamped to the field's bounds; then the default, the
    examples, and values derived from the annotation. The caller checks which are legal.
    """
    number = _number(value)
    for option in spec.options:
        if option.kind in ("int", "float") and number is not None:
            yield from _clamp(option, number)
        elif option.kind == "bool" and str(value).strip().lower() in _BOOL_SPELLINGS:
            yield _BOOL_SPELLINGS[str(value).strip().lower()]
        elif option.kind == "none" and str(value).strip().lower() in _NULL_SPELLINGS:
            yield None
        elif option.kind == "literal":
            name = closest(value, [item for item in option.of if isinstance(item, str)])
            numbers = [item for item in option.of if _number(item) is not None]
            yield from [] if name is None else [name]
            if number is not None and numbers:
                yield min(numbers, key=lambda item: abs(item - number))
        elif option.kind in ("str", "other") and (isinstance(value, str) or number is not None):
            yield from _repair_text(option, str(value).strip())
        elif option.kind in ("list", "fixed") and value is not MISSING:
            items = value if isinstance(value, list) else [value]
            yield items
            fill = [] if option.kind == "list" else [_filler(FieldSpec(hint)) for hint in option.of]
            most = len(fill) or option.bounds.get("max_length")
            yield [*items, *fill[len(items) :]][:most]
        elif option.kind == "slot" and isinstance(value, str):
            kind = closest(value, option.of.kinds)
            yield from [] if kind is None else [{option.of.tag: kind}]
    if spec.default is not MISSING:
        yield spec.default
    yield from spec.examples
    yield from _minimal_values(spec, value)


def _number(value: Any) -> int | float | None:
    """Convert a value to a finite number (``"1e-4"``, ``"1_000"``, ``"4"``), or return None."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return int(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d_]+", value) else number


def _clamp(option: Option, number: int | float) -> Iterator[int | float]:
    """Yield a number as the option's type, clamped to its bounds and rounded to its multiples.

    Yields nothing for a real number beyond an exclusive bound, which has no nearest legal value.
    """
    bounds = option.bounds
    integer = option.kind == "int"
    above = bounds.get("gt", -math.inf)
    below = bounds.get("lt", math.inf)
    if not above < number < below and not integer:
        return
    most = MOST[option.kind]
    low = bounds.get("ge", above + 1 if "gt" in bounds else -most)
    high = bounds.get("le", below - 1 if "lt" in bounds else most)
    clamped = min(max(number, low), high) if integer or "ge" in bounds or "le" in bounds else number
    clamped = round(clamped) if integer else float(clamped)
    step = bounds.get("multiple_of")
    if step:
        yield from (type(clamped)(step * round(clamped / step + d)) for d in (0, 1, -1))
    yield clamped


def _repair_text(option: Option, text: str) -> Iterator[str]:
    """Yield text unchanged, fitted to its length bounds, and without illegal characters."""
    yield text
    yield text[: option.bounds.get("max_length")].ljust(option.bounds.get("min_length", 0), "x")
    pattern = option.bounds.get("pattern")
    if pattern is not None:
        parts = re.split(r"[\s,;]+|(?<=\d)(?=[a-z])", text)
        yield " ".join(part for part in parts if re.search(pattern, part))
        yield re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _minimal_values(spec: FieldSpec, value: Any = MISSING) -> Iterator[Any]:
    """Yield minimal values for each option of a field, null last.

    For a slot it is the kind that ``value`` most likely means.
    """
    for option in sorted(spec.options, key=lambda option: option.kind == "none"):
        bounds = option.bounds
        if option.kind == "record":
            yield minimal(option.of)
        elif option.kind == "slot":
            kind = likely_kind(spec, option.of, value)
            yield None if kind is None else minimal(option.of.kinds[kind], {option.of.tag: kind})
        elif option.kind == "list":
            yield [_filler(FieldSpec(option.of))] * bounds.get("min_length", 0)
        elif option.kind == "fixed":
            yield [_filler(FieldSpec(hint)) for hint in option.of]
        elif option.kind == "literal":
            yield from option.of
        elif option.kind in ("int", "float"):
            low = bounds.get("gt", -math.inf)
            high = bounds.get("lt", math.inf)
            inner = max(low + 1, min(high - 1, 0))
            between = (low + high) / 2 if math.isfinite(high - low) else inner
            yield from (clamped for number in (1, 0, between) for clamped in _clamp(option, number))
        elif option.kind in ("str", "other"):
            yield "x" * max(1, bounds.get("min_length", 1))
        else:
            yield {"bool": False, "map": {}}.get(option.kind)


def _filler(spec: FieldSpec) -> Any:
    """Return a value for an unset field: its default, an example, or a minimal value."""
    if spec.default is not MISSING:
        return spec.default
    return next(chain(spec.examples, _minimal_values(spec)), None)


def minimal(record: type[BaseModel], values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return raw data for a record: ``values``, and placeholders for other required fields."""
    fill = {
        key: _filler(specs(record)[key]) for key in required(record) if key not in (values or {})
    }
    return {**(values or {}), **fill}
