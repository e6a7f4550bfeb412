"""All planted bugs."""

from tests.plants import balance, routing, rows, stored
from tests.plants.plant import Plant

PLANTS: tuple[Plant, ...] = tuple(
    sorted(
        (*balance.PLANTS, *routing.PLANTS, *rows.PLANTS, *stored.PLANTS),
        key=lambda plant: plant.bug,
    )
)
REQUIRED = (
    *(f"b{n:02d}" for n in range(5, 10)),
    *(f"b{n:02d}" for n in range(12, 20)),
    *(f"b{n:02d}" for n in range(22, 25)),
    "b31",
    "b36",
)
"""Classes that need a test of their own and a bug that it is shown to notice."""
