"""How many pages a rank has for experts' rows of a step, as its plan says."""

from collections import Counter

from moefold.moe.dispatch.config import FixedRoom
from moefold.parallel.apply import ModelParts
from moefold.planner.case import Keeping, offloaded, recomputed
from moefold.planner.memory_pages import pages
from moefold.planner.memory_steps import steps_of
from moefold.schedule.table import Line
from moefold.spec.layer import Shape


def pages_of(placed: ModelParts, line: Line, rows: int) -> dict[int, int]:
    """Return pages by bytes of a row, for micro-batches of which so many rows are here."""
    layout, decoder, sizes = placed.layout, placed.model.record, placed.layout.split
    assert isinstance(layout.dispatch, FixedRoom)
    width = placed.model.recipe.dtype.itemsize
    room = layout.dispatch.arriving(sizes)
    shape = Shape(
        decoder.hidden, rows, sizes.tp, sizes.etp, 1.0, width, sizes.cp, ep=sizes.ep, room=room
    )
    keeping = Keeping(recompute=recomputed(layout.recompute), **offloaded(layout.offload))
    numbers = ((*chunk.layers, *chunk.ahead) for chunk in placed.chunks)
    chunks = [Counter(decoder.blocks[int(n)] for n in chunk).items() for chunk in numbers]
    return pages(chunks, shape, keeping, steps_of(line, sizes.vpp))
