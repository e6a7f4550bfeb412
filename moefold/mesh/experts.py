"""Where each expert lives: a table, so that experts can move."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Seat(NamedTuple):
    """Where an expert lives: a coordinate on the expert-parallel axis, and a slot there."""

    ep: int
    slot: int


@dataclass(frozen=True)
class ExpertTable:
    """The seat of every expert of one layer."""

    rows: tuple[tuple[int, ...], ...]
    """Expert ids in the order of their slots, for each coordinate of the expert-parallel axis."""

    def __post_init__(self) -> None:
        """Refuse a table in which an expert is missing or stands twice."""
        found = sorted(expert for row in self.rows for expert in row)
        if found != list(range(len(found))):
            twice = sorted({e for e in found if found.count(e) > 1})
            missing = sorted(set(range(len(found))) - set(found))
            raise ValueError(
                f"each expert has one seat; seated twice: {twice or 'none'}, without a seat: "
                f"{missing or 'none'}"
            )

    @classmethod
    def even(cls, experts: int, ep: int) -> "ExpertTable":
        """Seat neighbouring experts together, equally many at each of ``ep`` coordinates.

        Raises:
            ValueError: where ``ep`` does not divide ``experts``.
        """
        if experts % ep:
            raise ValueError(f"ep {ep} divides the number of experts ({experts})")
        each = experts // ep
        return cls(tuple(tuple(range(i * each, i * each + each)) for i in range(ep)))

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """The seat of each expert, by its id."""
        found = {
            e: Seat(ep, slot) for ep, row in enumerate(self.rows) for slot, e in enumerate(row)
        }
        return tuple(found[expert] for expert in range(len(found)))

    def swapped(self, one: int, other: int) -> "ExpertTable":
        """Return the table in which two experts have changed seats."""
        places = {one: other, other: one}
        return self.reordered([places.get(expert, expert) for expert in range(len(self.seats))])

    def reordered(self, experts: Sequence[int]) -> "ExpertTable":
        """Return the table in which ``experts[i]`` sits where expert ``i`` sat."""
        return ExpertTable(tuple(tuple(experts[expert] for expert in row) for row in self.rows))
