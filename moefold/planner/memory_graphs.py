"""Static memory of CUDA graphs of parts of blocks: their inputs and outputs.

Each pass in flight has its own: rows of its micro-batch, rows and their gradients at borders of
blocks, and rows that experts' ranks exchange. Some are saved for backward too; these are not
counted again as activations.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moefold.model.config import Block
from moefold.planner.case import Keeping
from moefold.planner.memoize import memoize
from moefold.planner.memory_saved import saved_tensors
from moefold.planner.memory_steps import RunningAction
from moefold.spec.layer import INDEX, STATISTIC, Shape, described

ROW_BYTES = 4 * INDEX + 1
"""Bytes per row of a micro-batch: its id, label, position and number, and whether it is valid."""
SENT_TO_EXPERTS = frozenset(("residual", "ffn_norm.output"))
"""Saved tensors of a block that are sent to the ranks of its experts."""
RECEIVED_BY_EXPERTS = frozenset(
    ("experts.input", "experts.weights", "combine.tokens", "dispatch.rows")
)
"""Saved tensors of a block that are received by the ranks of its experts."""


class StaticBytes(NamedTuple):
    """Static bytes of a block's graphs for one pass."""

    internal: float
    """Tensors between its parts, without the block's input and output rows."""
    saved: float
    """Static tensors that are saved for backward."""
    writes_output: bool
    """Whether a graph, not an exchange, writes the block's output rows."""


@memoize(1 << 10)
def static_bytes(block: Block, shape: Shape, keeping: Keeping, fixed: bool) -> StaticBytes:
    """Return the static bytes of a block's graphs; ``fixed``: experts have graphs too."""
    spec, times = described(block.ffn), 1 + ("block" in keeping.recompute)
    balance = getattr(spec, "balance", ())
    terms = sum(getattr(one, "coefficient", 0) > 0 for one in balance) * STATISTIC
    routing = spec.routing
    if routing is None or shape.ep * shape.etp == 1:
        return StaticBytes((times + 1) * terms, 0.0, True)
    names = SENT_TO_EXPERTS | RECEIVED_BY_EXPERTS if fixed else SENT_TO_EXPERTS
    parts = [part for part in saved_tensors(block, shape) if part.name in names and part.saved]
    here = (part for part in parts if not (keeping.page and part.rows))
    shared = sum(part.bytes for part in here if part.stays(keeping.recompute))
    copies, width = shape.rows * routing.top_k, routing.width or shape.hidden
    there = 2 * shape.row + terms + copies * STATISTIC
    # With the router's choice, which is made once.
    back = shape.row + terms + copies * (STATISTIC + INDEX)
    if routing.width:
        there, back = (size + shape.rows * width * shape.width for size in (there, back))
    if fixed:
        rows, adds = shape.received(routing), "shared" in {o.name for o in spec.operations(1)}
        sent = rows * width * shape.width
        places = rows + shape.rows * (routing.places or routing.top_k) + shape.places
        places += shape.ep * shape.clones
        offsets = 4 * (routing.experts // shape.ep + shape.clones)
        there += 2 * sent + rows * STATISTIC + offsets + places * INDEX + adds * shape.row
        back += 2 * sent + rows * STATISTIC + adds * shape.row
    return StaticBytes(times * there + back, shared, False)


def chunk_static_bytes(
    blocks: Sequence[Block], shape: Shape, keeping: Keeping, fixed: bool, ahead: int
) -> tuple[float, float]:
    """Return bytes of a chunk's static tensors for one pass, and the part saved for backward.

    Args:
        blocks: blocks of the chunk, in order.
        shape: shape of a layer.
        keeping: what is recomputed; recompute of whole blocks has graphs of its own.
        fixed: whether experts get the same number of rows in each pass.
        ahead: further tokens that a row predicts.
    """
    times = 1 + ("block" in keeping.recompute)
    found = [static_bytes(block, shape, keeping, fixed) for block in blocks]
    size = micro_batch_bytes(shape, ahead) + sum(one.internal for one in found)
    if not found:
        return size, 0.0
    # Rows, and gradients, that no graph writes are copied for the graph that reads them.
    borders = times * (len(found) + found[-1].writes_output) + len(found) + 1
    entered = len(found) if times == 1 else sum(one.writes_output for one in found[:-1])
    return size + borders * shape.row, entered * shape.row + sum(one.saved for one in found)


def micro_batch_bytes(shape: Shape, ahead: int) -> int:
    """Return the bytes of a micro-batch's ids, labels and positions: the rank's and tp group's."""
    rows = shape.rows + (shape.piece if shape.tp > 1 else 0)
    return rows * (1 + ahead) * ROW_BYTES


def max_in_flight(steps: Iterable[RunningAction], chunks: int) -> list[int]:
    """Return the largest number of passes in flight of each chunk."""
    most = [0] * chunks
    for step in steps:
        for at in range(chunks):
            most[at] = max(most[at], step.saved[at] + step.deferred[at] + (step.forward == at))
    return most
