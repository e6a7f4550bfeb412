"""Experts' feed-forward in other forms than SwiGLU, in plain torch: biases, a clamped gate, weights
on the input.

R rows, D hidden, F width, E experts; rows past the last offset belong to none and may hold
anything. ``a = p * (up + offset) * gate * sigmoid(alpha * gate)``, where ``gate`` is bounded from
above and ``up`` from both sides by ``limit`` (gpt-oss, arXiv 2508.10925). Where weights are on the
input (Llama 4), ``p`` is a factor of the rows before the first product, and of nothing else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.gradients import GradientSink, Product, made
from moefold.kernels.operand import Operand
from moefold.kernels.rows import expert_of_rows, wide


@dataclass(frozen=True)
class ExpertForm:
    """What one pass of some experts computes beside their products."""

    offs_E: Tensor
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    in_bias: Operand | None = None
    """[E, 2, F]"""
    out_bias: Operand | None = None
    """[E, D]"""
    share: float = 1.0
    """Of the output's bias that this rank adds, where several have a slice of each expert."""
    on_input: bool = False
    """Whether a row is weighed before the first product."""

    @property
    def masters(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases as autograd knows them."""
        biases = self.in_bias, self.out_bias
        return biases[0] and biases[0].master, biases[1] and biases[1].master  # type: ignore[return-value]

    def _rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return each row's expert, and whether it has one."""
        expert_R = expert_of_rows(self.offs_E, rows)
        return expert_R.clamp(max=len(self.offs_E) - 1), expert_R < len(self.offs_E)

    def _of_rows(self, bias: Operand, like: Tensor) -> Tensor:
        expert_R, live_R = self._rows(len(like))
        rows = bias.value.flatten(1).to(like.dtype)[expert_R]
        return rows.masked_fill(~live_R[:, None], 0)

    def enter(self, x_RD: Tensor, p_R: Tensor) -> Tensor:
        """Return the rows of the first product."""
        return x_RD * p_R[:, None].to(x_RD.dtype) if self.on_input else x_RD

    def leave(
        self, x_RD: Tensor, p_R: Tensor, dx_RD: Tensor | None, dp_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients of rows and weights from that of the first product's rows."""
        if not self.on_input or dx_RD is None:
            return dx_RD, dp_R
        towards_R = torch.linalg.vecdot(wide(x_RD), wide(dx_RD)).to(p_R.dtype)
        _, live_R = self._rows(len(p_R))
        return dx_RD * p_R[:, None].to(dx_RD.dtype), towards_R.where(live_R, 0)

    def shift(self, h_R2F: Tensor) -> Tensor:
        """Return pre-activations with their bias; zeros in rows of no expert."""
        if self.in_bias is None:
            return h_R2F
        _, live_R = self._rows(len(h_R2F))
        return torch.where(live_R[:, None], h_R2F + self._of_rows(self.in_bias, h_R2F), 0)

    def shift_out(self, y_RD: Tensor, p_R: Tensor) -> Tensor:
        """Return outputs with their bias, weighted as they are."""
        if self.out_bias is None:
            return y_RD
        bias_RD = self._of_rows(self.out_bias, y_RD)
        return y_RD + bias_RD * self._of_bias(p_R).to(y_RD.dtype)

    def _of_bias(self, p_R: Tensor) -> Tensor:
        """Return the factor of each row's bias [R, 1]."""
        return self.share * (torch.ones_like(p_R) if self.on_input else p_R)[:, None]

    def forward(self, h_R2F: Tensor, p_R: Tensor) -> Tensor:
        """Return the activation [R, F] in the dtype of the pre-activation."""
        return self._activate(wide(h_R2F), p_R).to(h_R2F.dtype)

    def _activate(self, h_R2F: Tensor, p_R: Tensor) -> Tensor:
        gate, up = h_R2F.chunk(2, dim=1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        a_RF = (up + self.offset) * gate * torch.sigmoid(self.alpha * gate)
        return a_RF if self.on_input else p_R[:, None] * a_RF

    def backward(
        self, h_R2F: Tensor, p_R: Tensor, da_RF: Tensor, dy_RD: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return ``dh_R2F``, ``dp_R``, through the output's bias too, and ``a_RF`` again."""
        with torch.enable_grad():
            h, p = wide(h_R2F).detach().requires_grad_(), p_R.detach().requires_grad_()
            a_RF = self._activate(h, p)
            asked = (h,) if self.on_input else (h, p)
            dh_R2F, *found = torch.autograd.grad(a_RF, asked, da_RF.to(a_RF.dtype))
        a_RF = a_RF.detach().to(h_R2F.dtype)
        if self.on_input:
            return dh_R2F.to(h_R2F.dtype), None, a_RF
        (dp_R,) = found
        if self.out_bias is not None:
            bias_RD = self._of_rows(self.out_bias, dy_RD)
            dp_R = dp_R + self.share * torch.linalg.vecdot(wide(bias_RD), wide(dy_RD))
        _, live_R = self._rows(len(p_R))
        return dh_R2F.to(h_R2F.dtype), dp_R.where(live_R, 0), a_RF

    def deliver(
        self, dh_R2F: Tensor, dy_RD: Tensor, p_R: Tensor, sink: GradientSink
    ) -> tuple[Tensor | None, Tensor | None]:
        """Hand the biases' gradients to the sink: sums over rows, which are made at once."""
        found: list[Tensor | None] = [None, None]
        if self.in_bias is not None and self.in_bias.master.requires_grad:
            found[0] = sink.deliver(self.in_bias.master, self._sum(dh_R2F, self.in_bias))
        if self.out_bias is not None and self.out_bias.master.requires_grad:
            weighed_RD = wide(dy_RD) * self._of_bias(p_R)
            found[1] = sink.deliver(self.out_bias.master, self._sum(weighed_RD, self.out_bias))
        return found[0], found[1]

    def _sum(self, rows: Tensor, bias: Operand) -> Product:
        """Return what adds up each expert's rows: sorted, so that no order is left to chance."""
        expert_R, live_R = self._rows(len(rows))
        rows = rows.to(bias.master.dtype).masked_fill(~live_R[:, None], 0)
        experts = len(self.offs_E)
        summed = torch.ops.aten.embedding_dense_backward(rows, expert_R, experts, -1, False)
        return made(summed.view(bias.value.shape))
