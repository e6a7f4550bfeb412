"""What a block keeps for backward, tensor by tensor, as its autograd functions save it.

It follows from the layers' descriptions (``moefold/spec/layer.py``). Weights and their copies are
not among it, nor what a whole pass shares (rotary angles, token ids).
``tests/cpu/test_planner_kept.py`` holds every line against what a pass really leaves alive.
"""

from collections.abc import Iterable

from moefold.model.config import Block
from moefold.planner.case import Case
from moefold.spec.layer import NOTHING, Modules, Saved, Shape, described


def shape_of(case: Case) -> Shape:
    """Return the shape of a case's layers."""
    sizes, width = case.sizes, 4 if case.numbers.recipe == "fp32" else 2
    # NCCL EP has room for all rows of all ranks, filled or not.
    load = float(sizes.ep) if case.dispatch == "nccl_ep" else case.load
    return Shape(
        case.decoder.hidden, case.rows, sizes.tp, sizes.etp, load, width, sizes.cp, case.context
    )


def kept(block: Block, shape: Shape) -> tuple[Saved, ...]:
    """Return what one block keeps if nothing is recomputed, as Moefold's layers do.

    Raises:
        ValueError: where a layer from outside describes nothing.
    """
    halves = (described(record).saved(shape) for record in (block.attention, block.ffn))
    return (Saved("input", shape.row), *(saved for half in halves for saved in half))


def kept_bytes(parts: Iterable[Saved], recompute: Modules = NOTHING) -> int:
    """Return the bytes that stay under a recompute policy."""
    return sum(part.bytes for part in parts if part.stays(recompute))
