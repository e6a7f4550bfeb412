"""Grouped-query attention within a window and with a sink of each head.

H query heads, G key-value heads, d query-key and v value dims per head, T rows.
"""

import torch
from torch import Tensor, nn

from moefold.layers.attention import GroupedQueryAttention, attended
from moefold.layers.flow import Flow
from moefold.layers.kinds.windowed import Windowed


class WindowedAttention(GroupedQueryAttention):
    """Each row sees the last ``window`` rows of its document, and sinks take weight from them."""

    def __init__(self, record: Windowed, hidden: int, epsilon: float) -> None:
        super().__init__(record, hidden, epsilon)
        self.sinks = nn.Parameter(torch.empty(record.heads)) if record.sinks else None
        self.window = record.window

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, flow: Flow) -> Tensor:
        """Return what rows of turned queries see within the window."""
        scale = self.record.softmax_scale
        return attended(self, q_THd, k_TGd, v_TGv, scale, flow, self.window, self.sinks)
