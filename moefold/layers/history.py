"""Delayed scaling: scales of whole matrices from a history of largest magnitudes (amax) for each
operand of a weight's products, by the rule of TransformerEngine with margin 0.

The codes of a step use the scales at its start, and larger values saturate. The step's amax, a
maximum over all passes and ranks, enters the history with the update; an abandoned step changes
nothing. R roles, M matrices of the whole weight, H steps.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.collectives import max_
from moefold.comm.group import Group
from moefold.kernels.scaled.products import Role

ROLES: tuple[Role, ...] = ("rows", "weight", "gradient")


class AmaxHistory(nn.Module):
    """Amax history of the operands of one weight's products, replicated on each rank.

    Its fp32 buffers belong to the training state, not to the model.
    """

    past_RMH: Tensor
    seen_RM: Tensor

    def __init__(self, matrices: int, steps: int, latest: bool, device: torch.device) -> None:
        super().__init__()
        self._latest = latest
        shape = (len(ROLES), matrices, 1 + steps)
        # First the current scaling amax (0: scale 1), then those of past steps, latest first.
        past_RMH = torch.zeros(shape, dtype=torch.float32, device=device)
        self.register_buffer("past_RMH", past_RMH, persistent=False)
        self.register_buffer("seen_RM", past_RMH[..., 0].clone(), persistent=False)

    @torch.no_grad()
    def scaling_amax(
        self, amax: Tensor, role: Role, matrices: Sequence[int], record: bool
    ) -> Tensor:
        """Return the amax to scale by, in place of the current one.

        Args:
            amax: fp32 largest magnitude of this rank's part of each matrix; non-finite ones are
                returned as they are.
            role: operand of the product.
            matrices: indices of the matrices in the weight.
            record: whether to add ``amax`` to the history.
        """
        role_index = ROLES.index(role)
        first = matrices[0]
        end = matrices[0] + len(matrices)
        seen_M = self.seen_RM[role_index]
        now_M = self.past_RMH[role_index, :, 0]
        if list(matrices) == [*range(first, end)]:  # no index tensor to copy to the device
            recorded_M = seen_M[first:end]
            now_M = now_M[first:end]
            if record:
                torch.maximum(recorded_M, amax.flatten(), out=recorded_M)
        else:
            matrix_index = torch.tensor(matrices, device=amax.device)
            now_M = now_M[matrix_index]
            if record:
                seen_M.scatter_reduce_(0, matrix_index, amax.flatten(), "amax")
        return torch.where(amax.isfinite(), now_M.view_as(amax), amax)

    @torch.no_grad()
    def advance(self) -> None:
        """Append the step's amax to the history, and compute the next scales."""
        past_RMH = self.past_RMH
        seen_RM = self.seen_RM
        past_RMH[..., 2:] = past_RMH[..., 1:-1].clone()
        past_RMH[..., 1] = torch.where(seen_RM.isfinite(), seen_RM, 0)
        chosen_RM = past_RMH[..., 1] if self._latest else past_RMH[..., 1:].amax(-1)
        # Matrices without a positive amax in the history keep their scale.
        past_RMH[..., 0] = torch.where(chosen_RM > 0, chosen_RM, past_RMH[..., 0])


def all_reduce_amax(histories: Collection[AmaxHistory], ranks: Group) -> None:
    """All-reduce the step's amax by maximum over ranks that share the layers."""
    if ranks.size == 1 or not histories:
        return
    amaxes = [history.seen_RM for history in histories]
    flat = max_(torch.cat([amax.flatten() for amax in amaxes]), ranks)
    sizes = [amax.numel() for amax in amaxes]
    for amax, reduced in zip(amaxes, flat.split(sizes), strict=True):
        amax.copy_(reduced.view_as(amax))
