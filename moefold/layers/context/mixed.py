"""Two levels: neighbouring context ranks share heads, and a ring runs between such groups.

Neighbours' rows together are again two pieces, one from either end: a zigzag over the groups.
Shapes as in ``ulysses`` and ``ring``.
"""

from torch import Tensor

from moefold.comm.world import World
from moefold.layers.config import Mixed
from moefold.layers.context.ring import ring_attention
from moefold.layers.context.sight import Heads
from moefold.layers.context.ulysses import to_heads, to_rows


def attend(record: Mixed, heads: Heads, world: World) -> Tensor:
    """Return ``out_THv`` of this rank's rows."""
    inner, outer = world.split("cp", record.heads)
    return to_rows(ring_attention(to_heads(heads, inner), outer), inner)
