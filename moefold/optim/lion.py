"""Lion: the update is the sign of a momentum (arXiv 2302.06675, algorithm 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.optim.config import Lion
from moefold.optim.lists import MomentumOptimizer

aten = torch.ops.aten


class LionOptimizer(MomentumOptimizer):
    """Lion over named parameters; weight decay is decoupled."""

    rule: Lion

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Move each element by the rate, against the momentum's sign; then average the gradient."""
        newest, kept = self.rule.betas
        direction = aten._foreach_lerp(momenta, grads, 1 - newest)
        aten._foreach_sign_(direction)
        aten._foreach_mul_(params, 1 - lr * weight_decay)
        aten._foreach_add_(params, direction, alpha=-lr)
        aten._foreach_lerp_(momenta, grads, 1 - kept)
