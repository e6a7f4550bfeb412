"""Static inputs and outputs of CUDA graphs that capture parts of blocks.

Each pass in flight has its own: rows of its micro-batch, rows and their gradients between blocks,
and rows that expert ranks exchange. Those that are saved for backward too are not counted again as
activations.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moefold.model.config import Block
from moefold.planner.memoize import memoize
from moefold.planner.memory_saved import saved_tensors
from moefold.spec.forward_only import num_passes
from moefold.spec.layer import INDEX, STATISTIC, Modules, SavedKind, Shape, as_layer_spec

ROW_BYTES = 4 * INDEX + 1
"""Bytes per row of a micro-batch: its id, label, position and number, and whether it is valid."""


class StaticBytes(NamedTuple):
    """Static bytes of a block's graphs for one pass."""

    internal: float
    """Tensors between its parts, without the block's input and output rows."""
    saved: float
    """Static tensors that are saved for backward."""
    writes_output: bool
    """Whether a graph, not an exchange, writes the block's output rows."""


@memoize(1 << 10)
def static_bytes(
    block: Block, shape: Shape, recompute: Modules, paged: bool, fixed: bool
) -> StaticBytes:
    """Return the static bytes of a block's graphs; ``fixed``: experts have graphs too."""
    spec = as_layer_spec(block.ffn)
    forwards = 1 + ("block" in recompute)
    balance = getattr(spec, "balance", ())
    losses = sum(getattr(term, "coefficient", 0) > 0 for term in balance) * STATISTIC
    routing = spec.routing
    if routing is None or shape.ep * shape.etp == 1:
        return StaticBytes((forwards + 1) * losses, 0.0, True)
    sent = (SavedKind.RESIDUAL, SavedKind.NORM_OUTPUT)
    exchanged = [
        tensor
        for tensor in saved_tensors(block, shape)
        if (tensor.sublayer == "ffn" and tensor.kind in sent)
        or (fixed and tensor.kind is SavedKind.RECEIVED)
    ]
    saved = sum(
        tensor.bytes
        for tensor in exchanged
        if tensor.saved and tensor.is_saved_under(recompute) and not (paged and tensor.rows)
    )
    copies = shape.rows * routing.top_k
    width = routing.width or shape.hidden
    row = shape.hidden_bytes
    latent = shape.rows * width * shape.width if routing.width else 0
    forward = 2 * row + losses + copies * STATISTIC + latent
    # With the router's choice, which is made once.
    backward = row + losses + copies * (STATISTIC + INDEX) + latent
    if fixed:
        rows = shape.received_rows(routing)
        adds = "shared" in {o.name for o in spec.operations(1)}
        sent = rows * width * shape.width
        indices = rows + shape.rows * (routing.places or routing.top_k) + shape.places
        indices += shape.ep * shape.clones
        offsets = 4 * (routing.experts // shape.ep + shape.clones)
        forward += 2 * sent + rows * STATISTIC + offsets + indices * INDEX + adds * row
        backward += 2 * sent + rows * STATISTIC + adds * row
    return StaticBytes(forwards * forward + backward, saved, False)


def chunk_static_bytes(
    blocks: Sequence[Block],
    shape: Shape,
    recompute: Modules,
    paged: bool,
    fixed: bool,
    ahead: int,
) -> tuple[float, float]:
    """Return bytes of a chunk's static tensors for one pass, and the part saved for backward.

    Args:
        blocks: blocks of the chunk, in order.
        shape: sizes of the rank.
        recompute: kinds of module that are recomputed; whole blocks have graphs of their own.
        paged: whether experts' rows are saved in pages.
        fixed: whether experts get the same number of rows in each pass.
        ahead: further tokens that a row predicts.
    """
    forwards = 1 + ("block" in recompute)
    has_backward = [num_passes(block) == 2 for block in blocks]
    static = [static_bytes(block, shape, recompute, paged, fixed) for block in blocks]
    size = micro_batch_bytes(shape, ahead) + sum(block.internal for block in static)
    if not static:
        return size, 0.0
    twice = sum(has_backward)
    # The first block with a backward has no gradient of its input if one without is before it.
    gradients = twice + (twice == len(static))
    # Rows, and gradients, that no graph writes are copied for the graph that reads them.
    borders = len(static) + static[-1].writes_output + gradients
    borders += (forwards - 1) * (twice + static[-1].writes_output)
    inputs = twice
    if forwards == 2:
        pairs = zip(static, has_backward[1:], strict=False)
        inputs = sum(before.writes_output for before, read_again in pairs if read_again)
    saved = inputs * shape.hidden_bytes + sum(block.saved for block in static)
    return size + borders * shape.hidden_bytes, saved


def micro_batch_bytes(shape: Shape, ahead: int) -> int:
    """Return the bytes of a micro-batch's ids, labels and positions, of a rank and its tp group."""
    rows = shape.rows + (shape.piece if shape.tp > 1 else 0)
    return rows * (1 + ahead) * ROW_BYTES
