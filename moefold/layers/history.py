"""Scales of whole matrices by steps before: a history of largest magnitudes for each of a weight's
operands, by the rule of TransformerEngine's delayed scaling with margin 0.

A step's codes are made by what the history says when it begins, and what they do not reach is the
largest of the format. What the step saw, a maximum over all of its passes and ranks, enters the
history with the update; a step that is given up leaves no trace. R roles, M matrices of the whole
weight, H steps.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.collectives import max_
from moefold.comm.group import Group
from moefold.kernels.scaled.products import Role

ROLES: tuple[Role, ...] = ("rows", "weight", "gradient")


class AmaxHistory(nn.Module):
    """The largest magnitudes of the operands of one weight's products, whole on each rank.

    Its buffers are fp32 and state of training, not of the model.
    """

    past_RMH: Tensor
    seen_RM: Tensor

    def __init__(self, matrices: int, steps: int, latest: bool, device: torch.device) -> None:
        super().__init__()
        self._latest, shape = latest, (len(ROLES), matrices, 1 + steps)
        # First what scales now, 0 for a scale of 1; then those of steps, the last one first.
        past_RMH = torch.zeros(shape, dtype=torch.float32, device=device)
        self.register_buffer("past_RMH", past_RMH, persistent=False)
        self.register_buffer("seen_RM", past_RMH[..., 0].clone(), persistent=False)

    @torch.no_grad()
    def scaling(self, amax: Tensor, role: Role, matrices: Sequence[int], notes: bool) -> Tensor:
        """Return what matrices are scaled by in place of their own largest magnitudes.

        Args:
            amax: fp32, of the parts that are here, one of each matrix; what is not finite stays.
            role: what they are to the product.
            matrices: which of the weight's they belong to.
            notes: whether the step is to remember them.
        """
        place, first, end = ROLES.index(role), matrices[0], matrices[0] + len(matrices)
        seen_M, now_M = self.seen_RM[place], self.past_RMH[place, :, 0]
        if list(matrices) == [*range(first, end)]:  # no index is brought to the device
            noted_M, now_M = seen_M[first:end], now_M[first:end]
            if notes:
                torch.maximum(noted_M, amax.flatten(), out=noted_M)
        else:
            at = torch.tensor(matrices, device=amax.device)
            now_M = now_M[at]
            if notes:
                seen_M.scatter_reduce_(0, at, amax.flatten(), "amax")
        return torch.where(amax.isfinite(), now_M.view_as(amax), amax)

    @torch.no_grad()
    def advance(self) -> None:
        """Take what the step saw into the history."""
        past_RMH, seen_RM = self.past_RMH, self.seen_RM
        past_RMH[..., 2:] = past_RMH[..., 1:-1].clone()
        past_RMH[..., 1] = torch.where(seen_RM.isfinite(), seen_RM, 0)
        chosen_RM = past_RMH[..., 1 : 2 if self._latest else None].amax(-1)
        # What no step of the history had any of keeps its scale.
        past_RMH[..., 0] = torch.where(chosen_RM > 0, chosen_RM, past_RMH[..., 0])


def share_seen(histories: Collection[AmaxHistory], ranks: Group) -> None:
    """Make what a step saw the maximum over all ranks that have parts of the same layers."""
    if ranks.size == 1 or not histories:
        return
    seen = [one.seen_RM for one in histories]
    flat = max_(torch.cat([one.flatten() for one in seen]), ranks)
    for one, part in zip(seen, flat.split([one.numel() for one in seen]), strict=True):
        one.copy_(part.view_as(one))
