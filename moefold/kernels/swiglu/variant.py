"""Variants of experts' SwiGLU in plain torch: biases, clamped gate, routing weights on the input.

R rows, D hidden, F width, E experts; rows past the last offset belong to no expert and are
unspecified. ``a = p * (up + offset) * gate * sigmoid(alpha * gate)``, where ``gate`` is bounded
from above and ``up`` from both sides by ``limit`` (gpt-oss, arXiv 2508.10925). With routing weights
on the input (Llama 4), ``p`` scales only the rows before the first product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.gradients import GradientSink, Product, precomputed
from moefold.kernels.operand import Operand
from moefold.kernels.rows import expert_of_rows, upcast


@dataclass(frozen=True)
class ExpertVariant:
    """Biases and activation of a pass through some experts: everything but the matrix products."""

    offs_E: Tensor
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    in_bias: Operand | None = None
    """[E, 2, F]"""
    out_bias: Operand | None = None
    """[E, D]"""
    bias_fraction: float = 1.0
    """Fraction of the output bias that this rank adds, where ranks hold slices of each expert."""
    on_input: bool = False
    """Whether routing weights scale the input rows rather than the activation."""

    @property
    def masters(self) -> tuple[Tensor | None, Tensor | None]:
        """Parameters of ``in_bias`` and ``out_bias``, each None without that bias."""
        biases = self.in_bias, self.out_bias
        return biases[0] and biases[0].master, biases[1] and biases[1].master

    def _row_experts(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return each row's expert, clamped to E - 1, and whether the row has an expert."""
        expert_R = expert_of_rows(self.offs_E, rows)
        return expert_R.clamp(max=len(self.offs_E) - 1), expert_R < len(self.offs_E)

    def _bias_rows(self, bias: Operand, like: Tensor) -> Tensor:
        expert_R, live_R = self._row_experts(len(like))
        rows = bias.value.flatten(1).to(like.dtype)[expert_R]
        return rows.masked_fill(~live_R[:, None], 0)

    def scale_input(self, x_RD: Tensor, p_R: Tensor) -> Tensor:
        """Return the input rows of the first product."""
        return x_RD * p_R[:, None].to(x_RD.dtype) if self.on_input else x_RD

    def scale_input_backward(
        self, x_RD: Tensor, p_R: Tensor, dx_RD: Tensor | None, dp_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Backward of ``scale_input``: return gradients of input rows and routing weights."""
        if not self.on_input or dx_RD is None:
            return dx_RD, dp_R
        dp_input_R = torch.linalg.vecdot(upcast(x_RD), upcast(dx_RD)).to(p_R.dtype)
        _, live_R = self._row_experts(len(p_R))
        return dx_RD * p_R[:, None].to(dx_RD.dtype), dp_input_R.where(live_R, 0)

    def add_in_bias(self, h_R2F: Tensor) -> Tensor:
        """Return pre-activations plus their bias; rows of no expert become zero."""
        if self.in_bias is None:
            return h_R2F
        _, live_R = self._row_experts(len(h_R2F))
        return torch.where(live_R[:, None], h_R2F + self._bias_rows(self.in_bias, h_R2F), 0)

    def add_out_bias(self, y_RD: Tensor, p_R: Tensor) -> Tensor:
        """Return outputs plus their bias, scaled by :meth:`_out_bias_factor`."""
        if self.out_bias is None:
            return y_RD
        bias_RD = self._bias_rows(self.out_bias, y_RD)
        return y_RD + bias_RD * self._out_bias_factor(p_R).to(y_RD.dtype)

    def _out_bias_factor(self, p_R: Tensor) -> Tensor:
        """Return the factor [R, 1] of the output bias in each row."""
        return self.bias_fraction * (torch.ones_like(p_R) if self.on_input else p_R)[:, None]

    def forward(self, h_R2F: Tensor, p_R: Tensor) -> Tensor:
        """Return the activation [R, F] in the dtype of the pre-activation."""
        return self._activate(upcast(h_R2F), p_R).to(h_R2F.dtype)

    def _activate(self, h_R2F: Tensor, p_R: Tensor) -> Tensor:
        gate, up = h_R2F.chunk(2, dim=1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        a_RF = (up + self.offset) * gate * torch.sigmoid(self.alpha * gate)
        return a_RF if self.on_input else p_R[:, None] * a_RF

    def backward(
        self, h_R2F: Tensor, p_R: Tensor, da_RF: Tensor, dy_RD: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return ``dh_R2F``, ``dp_R`` (with the output bias's part) and the recomputed ``a_RF``."""
        with torch.enable_grad():
            h = upcast(h_R2F).detach().requires_grad_()
            p = p_R.detach().requires_grad_()
            a_RF = self._activate(h, p)
            inputs = (h,) if self.on_input else (h, p)
            dh_R2F, *dp_grads = torch.autograd.grad(a_RF, inputs, da_RF.to(a_RF.dtype))
        a_RF = a_RF.detach().to(h_R2F.dtype)
        if self.on_input:
            return dh_R2F.to(h_R2F.dtype), None, a_RF
        (dp_R,) = dp_grads
        if self.out_bias is not None:
            bias_RD = self._bias_rows(self.out_bias, dy_RD)
            dp_R = dp_R + self.bias_fraction * torch.linalg.vecdot(upcast(bias_RD), upcast(dy_RD))
        _, live_R = self._row_experts(len(p_R))
        return dh_R2F.to(h_R2F.dtype), dp_R.where(live_R, 0), a_RF

    def deliver(
        self, dh_R2F: Tensor, dy_RD: Tensor, p_R: Tensor, sink: GradientSink
    ) -> tuple[Tensor | None, Tensor | None]:
        """Pass the gradients of both biases, which are sums over rows, to the sink."""
        gradients: list[Tensor | None] = [None, None]
        if self.in_bias is not None and self.in_bias.master.requires_grad:
            gradients[0] = sink.deliver(
                self.in_bias.master, self._bias_gradient(dh_R2F, self.in_bias)
            )
        if self.out_bias is not None and self.out_bias.master.requires_grad:
            weighted_RD = upcast(dy_RD) * self._out_bias_factor(p_R)
            gradients[1] = sink.deliver(
                self.out_bias.master, self._bias_gradient(weighted_RD, self.out_bias)
            )
        return gradients[0], gradients[1]

    def _bias_gradient(self, rows: Tensor, bias: Operand) -> Product:
        """Return the product that sums the rows of each expert, in a deterministic order."""
        expert_R, live_R = self._row_experts(len(rows))
        rows = rows.to(bias.master.dtype).masked_fill(~live_R[:, None], 0)
        experts = len(self.offs_E)
        summed = torch.ops.aten.embedding_dense_backward(rows, expert_R, experts, -1, False)
        return precomputed(summed.view(bias.value.shape))
