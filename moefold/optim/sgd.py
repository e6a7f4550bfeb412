"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` computes it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.optim.config import Sgd
from moefold.optim.lists import MomentumOptimizer

aten = torch.ops.aten


class SgdOptimizer(MomentumOptimizer):
    """SGD over named parameters; weight decay is added to the gradient."""

    rule: Sgd

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Subtract the decayed sum of gradients, or with Nesterov's momentum what it will be."""
        momentum = self.rule.momentum
        if weight_decay:
            aten._foreach_add_(grads, params, alpha=weight_decay)
        direction = grads
        if momenta:
            aten._foreach_mul_(momenta, momentum)
            aten._foreach_add_(momenta, grads)
            direction = momenta
            if self.rule.nesterov:
                aten._foreach_add_(grads, momenta, alpha=momentum)
                direction = grads
        aten._foreach_add_(params, direction, alpha=-lr)
