"""Causal attention over rows that context ranks may share.

T rows here, H query heads, G key-value heads, d query-key dims and v value dims per head.
"""

from torch import Tensor

from moefold.config.slot import build
from moefold.kernels.attention.sdpa import attention
from moefold.layers.flow import Flow


def attend(q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, scale: float, flow: Flow) -> Tensor:
    """Return ``out_THv``; each row sees the rows of its own segment up to itself, on any rank."""
    if flow.world.group("cp").size == 1:
        return attention(q_THd, k_TGd, v_TGv, flow.rows.lengths, scale)
    assert flow.context is not None, "context ranks share rows and no kind says how"
    return build(flow.context, q_THd, k_TGd, v_TGv, scale, flow)
