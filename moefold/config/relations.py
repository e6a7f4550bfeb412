"""Relations between fields: asking every record of a legal tree for the rules it breaks."""

from collections.abc import Iterator
from typing import Any

from moefold.config.base import Record
from moefold.config.fields import MISSING, Place
from moefold.config.nearest import candidates
from moefold.config.problems import REMOVE, RunError, Spot, Violation
from moefold.config.records import plain, visit


def broken_rules(record: Record) -> list[Violation]:
    """Return every broken rule of a record and of all records below it, children's first."""
    return [item for _, item in rules_below(record)]


def rules_below(record: Record) -> list[tuple[Spot, Violation]]:
    """Return every broken rule with the path of the record whose rule it is.

    A record's rules may lean on those of the records below it: where they raise while one of
    those is broken, they are left for when it is mended.
    """
    found: list[tuple[Spot, Violation]] = []
    for path, part in visit(record):
        try:
            yielded = list(part.rules())
        except Exception as error:
            if any(below[: len(path)] == path for below, _ in found):
                continue
            if not isinstance(error, ValueError):
                raise
            yielded = [Violation((), plain(part), str(error), id="refused")]
        found += [(path, item.under(*path)) for item in yielded]
    return found


def demand(record: Record) -> None:
    """Refuse a record that was made in Python and breaks a rule.

    Raises:
        RunError: with every broken rule.
    """
    found = broken_rules(record)
    if found:
        raise RunError(found, plain(record), type(record).__name__)


def others(place: Place, value: Any) -> Iterator[Any]:
    """Yield values to try at a place where a rule refuses ``value``, the nearest first."""
    if place.default is not MISSING:
        yield plain(place.default)
    for option in place.options:
        if option.what == "bool" and isinstance(value, bool):
            yield not value
        elif option.what == "int" and isinstance(value, int):
            yield from _numbers(value)
        elif option.what == "float" and isinstance(value, int | float):
            yield from (value + d for d in (1.0, -1.0))
            yield from (value * factor for factor in (0.5, 2.0, 0.1, 10.0, 0.01, 100.0, -1.0))
        elif option.what == "list" and isinstance(value, list):
            yield from (value[:1], value[:-1], [])
        elif option.what == "none":
            yield None
    yield from candidates(place, MISSING)
    yield REMOVE


def _numbers(value: int) -> list[int]:
    """Return whole numbers to try: close ones, multiples, fractions, and powers of two."""
    tried = {value + d for d in range(-16, 17)} | {2**k for k in range(17)}
    tried |= {value * k for k in (2, 3, 4)} | {value // k for k in range(2, 9)}
    return sorted(tried - {value}, key=lambda number: (abs(number - value), number))
