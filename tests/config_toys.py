"""Small records for tests of the configuration room: every sort of field, and relations."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot

ENGINE = Slot("engine")
WHEEL = Slot("wheel", tag="family")

Size = Annotated[int, Field(ge=1)]


class Colour(Enum):
    """An enumeration, given by its value."""

    RED = "red"
    GREEN = "green"


@ENGINE.register
class Steam(Record):
    """Needs nothing."""

    kind: Literal["steam"] = "steam"
    pressure: Annotated[float, Field(gt=0, lt=40)] = 10.0


@ENGINE.register
class Diesel(Record):
    """Needs a size, and may hold another engine."""

    kind: Literal["diesel"] = "diesel"
    litres: Annotated[float, Field(gt=0)]
    cylinders: Size = 4
    spare: Annotated[Record, ENGINE] | None = None

    def rules(self) -> Iterator[Violation]:
        """At least half a litre per cylinder."""
        if self.litres < 0.5 * self.cylinders:
            rule = f"at least half a litre per cylinder ({self.cylinders})"
            yield Violation(("litres",), self.litres, rule, 0.5 * self.cylinders)


@WHEEL.register
class Iron(Record):
    """A kind told apart by another tag."""

    family: Literal["iron"] = "iron"
    spokes: Annotated[int, Field(ge=2, le=64, multiple_of=2)] = 8


@WHEEL.register
class Rubber(Record):
    """Has an optional bound."""

    family: Literal["rubber"] = "rubber"
    bar: Annotated[float, Field(ge=0.5, le=9)] | None = None


class Coach(Record):
    """One coach: seats come in rows."""

    seats: Size
    rows: Size = 1
    label: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=12)] = "coach"

    def rules(self) -> Iterator[Violation]:
        """Rows divide the seats."""
        if self.seats % self.rows:
            nearest = max(d for d in range(1, self.rows + 1) if self.seats % d == 0)
            yield Violation(("rows",), self.rows, f"divides seats ({self.seats})", nearest)


class Limits(Record):
    """Two bounds whose rule gives no nearest value."""

    low: float = 0.0
    high: float = 1.0
    count: int = 3

    def rules(self) -> Iterator[Violation]:
        """Low lies below high; the count is odd. Nothing is suggested."""
        if self.low >= self.high:
            yield Violation(("high",), self.high, f"above low ({self.low})")
        if self.count % 2 == 0:
            yield Violation(("count",), self.count, "is odd")


class Train(Record):
    """The whole: slots, lists, mappings, unions, and rules across the tree."""

    name: Annotated[str, Field(min_length=1)]
    coaches: Annotated[tuple[Coach, ...], Field(min_length=1)]
    engine: Annotated[Record, ENGINE] = Diesel(litres=3.0, cylinders=6)
    wheels: tuple[Annotated[Record, WHEEL], ...] = (Iron(),)
    limits: Limits = Limits()
    colour: Colour = Colour.RED
    speed: int | Literal["auto"] = "auto"
    load: dict[str, Annotated[float, Field(ge=0)]] = {}
    gauge: tuple[int, float] = (1, 1.435)
    depot: Path | None = None
    bell: bool = False
    crew: Annotated[int, Field(ge=1)] | None = None
    from_: Annotated[str | None, Field(alias="from")] = None
    uses: tuple[str, ...] = ()
    notes: Any = None

    def rules(self) -> Iterator[Violation]:
        """A wheel per coach; a crew member per two coaches, where the crew is given."""
        if len(self.wheels) > len(self.coaches):
            nearest = self.wheels[: len(self.coaches)]
            rule = f"at most one per coach ({len(self.coaches)})"
            yield Violation(("wheels",), self.wheels, rule, nearest)
        if self.crew is not None and 2 * self.crew < len(self.coaches):
            rule = f"at least half the coaches ({len(self.coaches)})"
            yield Violation(("crew",), self.crew, rule, -(-len(self.coaches) // 2))


def smallest() -> dict[str, Any]:
    """Return raw data with nothing that has a default."""
    return {"name": "slow", "coaches": [{"seats": 8}]}


def full() -> dict[str, Any]:
    """Return legal raw data with every sort of field in it."""
    return {
        "name": "express",
        "coaches": [{"seats": 12, "rows": 4}, {"seats": 9, "rows": 3, "label": "bar"}],
        "engine": {
            "kind": "diesel",
            "litres": 4.0,
            "cylinders": 8,
            "spare": {"kind": "steam", "pressure": 12.5},
        },
        "wheels": [{"family": "iron", "spokes": 12}, {"family": "rubber", "bar": 2.5}],
        "limits": {"low": -1.0, "high": 2.0, "count": 5},
        "colour": "green",
        "speed": 90,
        "load": {"coal": 1.5, "mail": 0.0},
        "gauge": [1, 1.0],
        "depot": "yard/one",
        "bell": True,
        "crew": 2,
        "from": "north",
        "uses": [],
        "notes": None,
    }
