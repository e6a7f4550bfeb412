"""What a pipeline rank holds once each step of its line has ended, activations row by row."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from moefold.layers.config import leaving
from moefold.planner.case import Case, Held, kinds
from moefold.planner.memory import orders, stage_of
from moefold.planner.memory_chunk import departing
from moefold.planner.memory_kept import layer_kept
from moefold.planner.memory_pages import here
from moefold.planner.memory_steps import Running, steps_of

FETCHED = "fetched"
"""The row of what is on its way back to the next step's backward from host and disk."""
ENDS = "ends"
"""The row of what is kept beside layers: between the last of them and the loss, above all."""


class After(NamedTuple):
    """Bytes after a step."""

    rows: dict[str, float]
    """Activations by the rows that layers keep, ``fetched`` and ``ends``."""
    operands: float
    """What products of weights wait with."""
    gradients: float
    away: tuple[float, float]
    """Activations on the host and on disk."""

    @property
    def activations(self) -> float:
        """Those of all rows."""
        return sum(self.rows.values())


def after_each(case: Case, rank: int) -> Iterator[After]:
    """Yield what is there after each step of a rank's line."""
    stage, held = stage_of(case, rank), case.chunks[rank]
    given = zip(held, orders(case, rank), stage.kept, strict=True)
    rows = [_rows(case, *one) for one in given]
    steps = list(steps_of(case.table.lines[rank], case.sizes.vpp))
    nothing = (0,) * len(rows)
    # What is there after a step is there before the next one, and nothing after the last.
    begun = frozenset(range(len(rows)))
    last = Running(None, None, "", nothing, nothing, begun)
    for step in [*steps[1:], last]:
        found = Counter[str]()
        for number, row in zip(step.kept, rows, strict=True):
            found.update({name: size * number for name, size in row.items()})
        made, away = dict[str, float](found), stage.away(step.kept)
        if step.backward is not None and step.frees and stage.chunks[step.backward].ahead:
            made[FETCHED] = stage.chunks[step.backward].ahead
        coming = sum(stage.chunks[number].coming for number in step.begun)
        operands = stage.there_before(step)[1]
        yield After(made, operands, stage.there + coming, away)


def _rows(case: Case, held: Held, order: tuple[int, ...], whole: float) -> Counter[str]:
    """Return what a chunk keeps of a micro-batch, by row; ``whole`` bytes in all.

    Layers are in ``order`` if any leave.
    """
    found, (blocks, _), keeping = Counter[str](), kinds(case.decoder), case.keeping
    for kind, count in held.layers:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute):
                found[part.name] += here(part, keeping).bytes * count
    for kind in order[: leaving(keeping.spill, len(order), held.loss)]:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(keeping.recompute) and part.rows and part.saved:
                found[part.name] += here(part, keeping).bytes
    for to, share in enumerate((keeping.offload_share, keeping.disk_share)):
        for kind in order[: leaving(share, len(order), held.loss)]:
            for part in departing(layer_kept(case, blocks[kind]), keeping)[to]:
                found[part.name] -= part.bytes
    found[ENDS] = round(whole) - found.total()
    return found
