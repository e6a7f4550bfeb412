"""All planted bugs."""

from tests.plants import (
    balance,
    chat,
    context,
    continued,
    corpora,
    data,
    dispatch,
    families,
    faults,
    fields,
    folders,
    groups,
    growth,
    kernels,
    layouts,
    losses,
    memory,
    multi_token,
    offload,
    pipeline,
    quantise,
    reshard,
    routing,
    rows,
    stored,
    tuning,
    vocabulary,
)
from tests.plants.plant import Plant

PLANTS: tuple[Plant, ...] = tuple(
    sorted(
        (
            *balance.PLANTS,
            *chat.PLANTS,
            *context.PLANTS,
            *continued.PLANTS,
            *corpora.PLANTS,
            *data.PLANTS,
            *dispatch.PLANTS,
            *families.PLANTS,
            *faults.PLANTS,
            *fields.PLANTS,
            *folders.PLANTS,
            *groups.PLANTS,
            *growth.PLANTS,
            *kernels.PLANTS,
            *layouts.PLANTS,
            *losses.PLANTS,
            *memory.PLANTS,
            *multi_token.PLANTS,
            *offload.PLANTS,
            *pipeline.PLANTS,
            *quantise.PLANTS,
            *reshard.PLANTS,
            *routing.PLANTS,
            *rows.PLANTS,
            *stored.PLANTS,
            *tuning.PLANTS,
            *vocabulary.PLANTS,
        ),
        key=lambda plant: plant.bug,
    )
)
REQUIRED = tuple(
    f"b{n:02d}" for n in (*range(1, 28), 30, 31, *range(32, 36), 36, 37, 39, 40, 41, 60, 61)
)
"""Classes that need a test of their own and a bug that it is shown to notice."""
