"""All planted bugs."""

from tests.plants import balance, context, data, dispatch, groups, pipeline, routing, rows, stored
from tests.plants.plant import Plant

PLANTS: tuple[Plant, ...] = tuple(
    sorted(
        (
            *balance.PLANTS,
            *context.PLANTS,
            *data.PLANTS,
            *dispatch.PLANTS,
            *groups.PLANTS,
            *pipeline.PLANTS,
            *routing.PLANTS,
            *rows.PLANTS,
            *stored.PLANTS,
        ),
        key=lambda plant: plant.bug,
    )
)
REQUIRED = (
    "b01",
    "b02",
    *(f"b{n:02d}" for n in range(5, 10)),
    *(f"b{n:02d}" for n in range(12, 20)),
    *(f"b{n:02d}" for n in range(21, 25)),
    "b31",
    "b32",
    "b34",
    "b36",
    "b40",
)
"""Classes that need a test of their own and a bug that it is shown to notice."""
