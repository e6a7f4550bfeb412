"""How many pages a rank has for experts' rows of a step, as its plan says."""

from moefold.layers.stash import Pages
from moefold.model.config import Block
from moefold.moe.dispatch.config import FixedRoom
from moefold.parallel.apply import ModelParts
from moefold.planner.case import Keeping, offloaded, recomputed
from moefold.planner.memory_pages import ChunkBlocks, pages
from moefold.schedule.table import Line
from moefold.spec.layer import Shape


def pages_of(placed: ModelParts, line: Line, rows: int) -> Pages:
    """Return pages by bytes of a row, for micro-batches of which so many rows are here."""
    layout, decoder, sizes = placed.layout, placed.model.record, placed.layout.split
    assert isinstance(layout.dispatch, FixedRoom)
    width = placed.model.recipe.dtype.itemsize
    room = layout.dispatch.arriving(sizes)
    shape = Shape(
        decoder.hidden, rows, sizes.tp, sizes.etp, 1.0, width, sizes.cp, ep=sizes.ep, room=room
    )
    keeping = Keeping(recompute=recomputed(layout.recompute), **offloaded(layout.offload))

    def blocks(numbers: tuple[str, ...]) -> list[Block]:
        return [decoder.blocks[int(number)] for number in numbers]

    chunks = [
        ChunkBlocks(blocks(one.layers), blocks(one.ahead), one.scores) for one in placed.chunks
    ]
    return Pages(*pages(chunks, shape, keeping, line))
