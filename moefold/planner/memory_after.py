"""What a pipeline rank holds once each step of its line has ended, activations row by row."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from moefold.planner.case import Case, Held, kinds
from moefold.planner.memory import stage_of, steps_of
from moefold.planner.memory_kept import layer_kept

ENDS = "ends"
"""The row of what is kept beside layers: between the last of them and the loss, above all."""


class After(NamedTuple):
    """Bytes after a step."""

    rows: dict[str, float]
    """Activations by the rows that layers keep, and ``ends``."""
    operands: float
    """What products of weights wait with."""
    gradients: float

    @property
    def activations(self) -> float:
        """Those of all rows."""
        return sum(self.rows.values())


def after_each(case: Case, rank: int) -> Iterator[After]:
    """Yield what is there after each step of a rank's line."""
    stage, held = stage_of(case, rank), case.chunks[rank]
    rows = [_rows(case, one, whole) for one, whole in zip(held, stage.kept, strict=True)]
    steps = list(steps_of(case.table.lines[rank], case.sizes.vpp))
    nothing = (0,) * len(rows)
    # What is there after a step is there before the next one, and nothing after the last.
    for step in [*steps[1:], steps[-1]._replace(kept=nothing, waiting=nothing)]:
        found = Counter[str]()
        for number, row in zip(step.kept, rows, strict=True):
            found.update({name: size * number for name, size in row.items()})
        coming = sum(stage.chunks[number].coming for number in step.begun)
        yield After(dict(found), stage.there_before(step)[1], stage.there + coming)


def _rows(case: Case, held: Held, whole: float) -> Counter[str]:
    """Return what a chunk keeps of a micro-batch, by row; ``whole`` bytes in all."""
    found, blocks = Counter[str](), kinds(case.decoder)[0]
    for kind, count in held.layers:
        for part in layer_kept(case, blocks[kind]):
            if part.stays(case.keeping.recompute):
                found[part.name] += part.bytes * count
    found[ENDS] = round(whole) - found.total()
    return found
