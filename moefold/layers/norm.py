"""RMSNorm as a layer."""

import torch
from torch import Tensor, nn

from moefold.kernels.norm.rms import rms_norm
from moefold.layers.flow import Flow


class RmsNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        """Return the normed rows; x is [T, ..., width]."""

        def normed(x: Tensor) -> Tensor:
            weight = flow.operand(self.weight, self.weight.dtype)
            return rms_norm(x, weight, self.epsilon, n_valid=flow.n_valid, sink=flow.sink)

        return flow.recompute.run("norms", normed, x)
