"""The dense SwiGLU feed-forward, of a block, or as a MoE layer's shared expert."""

import torch
from torch import Tensor, nn

from moefold.kernels.scaled.ffn import narrow_ffn
from moefold.kernels.swiglu.ffn import dense_products, gated_ffn
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.linear import Adaptable, Linear


class SwiGlu(Adaptable):
    """``w_out (silu(w_gate x) * w_up x)``. T rows, D hidden, F width.

    ``gated`` scales the output by a sigmoid of the row (Qwen2's shared expert).
    """

    def __init__(self, hidden: int, width: int, kind: str = "ffn", gated: bool = False) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(2, width, hidden))
        self.w_out = nn.Parameter(torch.empty(hidden, width))
        self.gate = Linear(hidden, 1) if gated else None
        self._kind = kind

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return [T, D]."""

        def ffn(x_TD: Tensor) -> Tensor:
            if self.narrow:
                whole = flow.whole
                codes_in, codes_out = (
                    whole.narrow_operand(getattr(self, name), narrow)
                    for name, narrow in self.narrow.items()
                )
                x_PD = flow.gather(x_TD)
                share_PD = narrow_ffn(x_PD, codes_in, codes_out, whole.run, flow.sink)
            else:
                w_in, w_out = (self.operand(name, flow.whole) for name in ("w_in", "w_out"))
                products = dense_products(flow.whole.n_valid)
                share_PD = gated_ffn(flow.gather(x_TD), w_in, w_out, products, flow.sink)
            y_TD = flow.scatter(share_PD)
            return y_TD if self.gate is None else y_TD * self.share(x_TD, flow)

        return flow.keeper.run(self._kind, ffn, x_TD)

    def share(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return what the gate scales each row's output by [T, 1]."""
        assert self.gate is not None
        return self.gate(x_TD, flow).sigmoid()


def dense_ffn(record: Dense, hidden: int) -> SwiGlu:
    """Build the dense feed-forward of a block."""
    return SwiGlu(hidden, record.width)
