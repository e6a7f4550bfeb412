"""What graphs of parts of blocks read and leave, which lies where it does from step to step.

Each pass in flight has its own: rows of its micro-batch, rows and their gradients at the borders of
blocks, and where a mixture sends, what goes to its ranks and comes back. Of these backward keeps
some, which are not counted with activations again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moefold.model.config import Block
from moefold.planner.case import Keeping
from moefold.planner.memory_kept import kept
from moefold.planner.memory_steps import Running
from moefold.planner.remember import remembered
from moefold.spec.layer import INDEX, STATISTIC, Shape, described

ROW_BYTES = 4 * INDEX + 1
"""Bytes of a row of a micro-batch: its id, label, position and number, and whether it counts."""
WAY_OUT = frozenset(("residual", "ffn_norm.output"))
"""Of what a block keeps, rows that go to the ranks of its experts."""
WAY_IN = frozenset(("experts.input", "experts.weights", "combine.tokens", "dispatch.rows"))
"""And what has come from them."""


class StaticBytes(NamedTuple):
    """Bytes of a block's parts for one pass."""

    inside: float
    """Between its parts, beside the rows that it takes and leaves."""
    kept: float
    """Of all, what backward keeps."""
    leaves: bool
    """Whether a graph leaves its rows, and not an exchange."""


@remembered(1 << 10)
def static_bytes(block: Block, shape: Shape, keeping: Keeping, fixed: bool) -> StaticBytes:
    """Return what graphs of a block read and leave; ``fixed``: of its experts too."""
    spec, times = described(block.ffn), 1 + ("block" in keeping.recompute)
    balance = getattr(spec, "balance", ())
    terms = sum(getattr(one, "coefficient", 0) > 0 for one in balance) * STATISTIC
    routing = spec.routing
    if routing is None or shape.ep * shape.etp == 1:
        return StaticBytes((times + 1) * terms, 0.0, True)
    names = WAY_OUT | WAY_IN if fixed else WAY_OUT
    parts = [part for part in kept(block, shape) if part.name in names and part.saved]
    here = (part for part in parts if not (keeping.page and part.rows))
    shared = sum(part.bytes for part in here if part.stays(keeping.recompute))
    copies, width = shape.rows * routing.top_k, routing.width or shape.hidden
    there = 2 * shape.row + terms + copies * STATISTIC
    # With the choice, which is made once.
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


def pass_bytes(
    blocks: Sequence[Block], shape: Shape, keeping: Keeping, fixed: bool, ahead: int
) -> tuple[float, float]:
    """Return the bytes of a chunk's static tensors for one pass, and what of them backward keeps.

    Args:
        blocks: of the chunk, in order.
        shape: of a layer.
        keeping: what is made again, of which graphs leave both times.
        fixed: whether as many rows come to experts in each pass.
        ahead: further tokens that a row predicts.
    """
    times = 1 + ("block" in keeping.recompute)
    found = [static_bytes(block, shape, keeping, fixed) for block in blocks]
    size = row_bytes(shape, ahead) + sum(one.inside for one in found)
    if not found:
        return size, 0.0
    # Of rows that no graph leaves, the next one reads a copy; of their gradients too.
    borders = times * (len(found) + found[-1].leaves) + len(found) + 1
    entered = len(found) if times == 1 else sum(one.leaves for one in found[:-1])
    return size + borders * shape.row, entered * shape.row + sum(one.kept for one in found)


def row_bytes(shape: Shape, ahead: int) -> int:
    """Return the bytes of a micro-batch's rows, of this rank and of its tensor group."""
    rows = shape.rows + (shape.piece if shape.tp > 1 else 0)
    return rows * (1 + ahead) * ROW_BYTES


def in_flight(steps: Iterable[Running], chunks: int) -> list[int]:
    """Return the most passes of each chunk that are between their first action and their last."""
    most = [0] * chunks
    for step in steps:
        for at in range(chunks):
            most[at] = max(most[at], step.kept[at] + step.waiting[at] + (step.forward == at))
    return most
