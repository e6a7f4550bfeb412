"""Layers that training runs forward only: no parameter below them or in them is trained.

No gradient reaches them, so that they save nothing for backward, and their backward is left out.
"""

from collections.abc import Iterable

from moefold.model.config import Block, Decoder
from moefold.spec.codes import CodedBlock
from moefold.spec.decoder import parts_below_trained


class ForwardOnlyBlock(Block):
    """A block that training runs forward only."""


class ForwardOnlyCodedBlock(CodedBlock, ForwardOnlyBlock):
    """A block with quantised products that training runs forward only."""


def mark_forward_only(blocks: Iterable[Block], decoder: Decoder) -> tuple[Block, ...]:
    """Return a decoder's blocks, those that training runs forward only as such."""
    first = max(parts_below_trained(decoder) - 1, 0)
    return tuple(_marked(b) if n < first else b for n, b in enumerate(blocks))


def num_passes(block: Block) -> int:
    """Return the number of a block's passes for a micro-batch: forward, and backward if any."""
    return 1 if isinstance(block, ForwardOnlyBlock) else 2


def _marked(block: Block) -> Block:
    kind = ForwardOnlyCodedBlock if isinstance(block, CodedBlock) else ForwardOnlyBlock
    return kind.model_construct(**dict(block))
