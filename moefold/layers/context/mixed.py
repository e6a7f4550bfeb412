"""Two levels: neighbouring context ranks share heads, and a ring runs between such groups.

Neighbours' rows together are again two pieces, one from either end: a zigzag over the groups.
Shapes as in ``ulysses`` and ``ring``.
"""

from torch import Tensor

from moefold.layers.config import Mixed
from moefold.layers.context.ring import ring_attention
from moefold.layers.context.ulysses import heads_here, to_heads, to_rows
from moefold.layers.flow import Flow


def attend(
    record: Mixed,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    scale: float,
    flow: Flow,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv`` of this rank's rows."""
    inner, outer = flow.world.split("cp", record.heads)
    q, k, v = to_heads((q_THd, k_TGd, v_TGv), inner)
    sinks_h, lengths = heads_here(sinks_H, inner), flow.rows.lengths
    return to_rows(ring_attention(q, k, v, scale, lengths, outer, window, sinks_h), inner)
