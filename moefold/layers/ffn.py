"""The dense SwiGLU feed-forward of a block, and the shared expert of an MoE layer."""

import torch
from torch import Tensor, nn

from moefold.kernels.scaled.ffn import scaled_ffn
from moefold.kernels.swiglu.ffn import block_products, dense_products, gated_ffn
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.linear import Adaptable, Linear


class SwiGlu(Adaptable):
    """``w_out (silu(w_gate x) * w_up x)``. T rows, D hidden, F width.

    ``gated`` scales the output by a learned sigmoid of the row (Qwen2's shared expert). With
    ``blocks`` both weights are block-diagonal, with equal blocks.
    """

    def __init__(
        self, hidden: int, width: int, kind: str = "ffn", gated: bool = False, blocks: int = 1
    ) -> None:
        super().__init__()
        lead = (blocks,) * (blocks > 1)
        block_hidden = hidden // blocks
        width = width // blocks
        self.w_in = nn.Parameter(torch.empty(*lead, 2, width, block_hidden))
        self.w_out = nn.Parameter(torch.empty(*lead, block_hidden, width))
        self.gate = Linear(hidden, 1) if gated else None
        self._kind = kind
        self._blocks = blocks

    def forward(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the output [T, D], under the activation policy of this kind of module."""
        return flow.saved_tensors.run(self._kind, lambda x_TD: self.rows(x_TD, flow), x_TD)

    def rows(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the output [T, D], without an activation policy."""
        whole = flow.whole
        if self.narrow:
            parameters = [(getattr(self, name), narrow) for name, narrow in self.narrow.items()]
            codes_in, codes_out = (
                whole.narrow_operand(parameter, narrow) for parameter, narrow in parameters
            )
            x_PD = flow.gather(x_TD)
            hidden = self.narrow["w_in"].recipe.hidden_format
            codes = codes_in, codes_out
            share_PD = scaled_ffn(x_PD, *codes, whole.row_runs, flow.sink, hidden=hidden)
        else:
            w_in, w_out = (self.operand(name, whole) for name in ("w_in", "w_out"))
            products = dense_products(whole.n_valid)
            if self._blocks > 1:
                products = block_products(whole.n_valid, self._blocks)
            share_PD = gated_ffn(flow.gather(x_TD), w_in, w_out, products, flow.sink)
        y_TD = flow.scatter(share_PD)
        return y_TD if self.gate is None else y_TD * self.gate_factors(x_TD, flow)

    def gate_factors(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the gate's factors [T, 1] on the rows' outputs."""
        assert self.gate is not None
        return self.gate(x_TD, flow).sigmoid()


class LowRankFfn(SwiGlu):
    """A SwiGLU between projections to a latent width and back, which tp does not cut."""

    def __init__(self, hidden: int, latent: int, width: int, blocks: int) -> None:
        super().__init__(latent, width, blocks=blocks)
        self.down = Linear(hidden, latent)
        self.up = Linear(latent, hidden)

    def rows(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return the output [T, D], without an activation policy."""
        return self.up(super().rows(self.down(x_TD, flow), flow), flow)


def dense_ffn(record: Dense, hidden: int) -> SwiGlu:
    """Build the dense feed-forward of a block."""
    if record.latent is not None:
        return LowRankFfn(hidden, record.latent, record.width, record.blocks)
    return SwiGlu(hidden, record.width, blocks=record.blocks)
