"""Grouped-query attention in chunks of a document, and with a temperature of each position.

T rows, H query heads, G key-value heads, d query-key and v value dims per head.
"""

import torch
from torch import Tensor

from moefold.layers.attention import GroupedQueryAttention, attended
from moefold.layers.flow import Flow
from moefold.layers.kinds.chunked import Chunked


class ChunkedAttention(GroupedQueryAttention):
    """A chunk's end is a document's end to attention; positions go on."""

    record: Chunked

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, flow: Flow) -> Tensor:
        """Return what rows of turned queries see of their chunk."""
        chunk, temperature = self.record.chunk, self.record.temperature
        if temperature is not None:
            steps_T = (flow.rows.positions_T + 1) // temperature.every
            wide = torch.promote_types(q_THd.dtype, torch.float32)
            factor_T = 1 + temperature.scale * torch.log1p(steps_T.to(wide))
            q_THd = q_THd * factor_T.to(q_THd.dtype)[:, None, None]
            flow.keeper.owns("attention", q_THd)
        seen = flow if chunk is None else flow.chunked(chunk)
        return attended(self, q_THd, k_TGd, v_TGv, self.record.softmax_scale, seen, chunk=chunk)
