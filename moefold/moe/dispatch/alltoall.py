"""Dispatch by one all-to-all over the expert-parallel group: each copy goes to its expert's rank.

T rows, D hidden, K experts per token, E experts, e of them here, R rows after dispatch, N rows
sent, P ranks of ``ep``, S of ``etp``. Ranks of ``etp`` hold slices of the same experts, so each
needs the rows that come to all of them, and their results are added up.
"""

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.permute.gather import collect
from moefold.moe.config import AllToAll
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import Plan, everyone, host_counts, slots_of
from moefold.moe.dispatch.local import permute
from moefold.moe.dispatch.order import sort_copies


class AllToAllDispatch(Across[AllToAll]):
    """Token copies over ``ep``."""

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, etp = world.group("ep"), world.group("etp")
        order = sort_copies(experts_TK, self._experts, complete)
        counts_PSPe = everyone(order.counts_B, world).unflatten(2, (ep.size, -1))
        coming_SPe = counts_PSPe[:, :, ep.index].transpose(0, 1)
        going_P = order.counts_B.view(ep.size, -1).sum(1)
        numbers = host_counts(torch.cat([going_P, coming_SPe.sum(2).flatten()]))
        plan = Plan.of(numbers[: ep.size], numbers[ep.size :], etp.index)
        order = order.first(sum(plan.send))
        x_RD = plan.out(order.rows(x_TD, complete), ep, etp)
        p_R = plan.out(order.entries(weights_TK), ep, etp)
        slots_R = slots_of(coming_SPe.flatten(0, 1), sum(plan.slices))
        experts = self._experts // ep.size
        here = permute(x_RD, p_R[:, None], slots_R[:, None], experts, True)
        handle = (order.token_R, order.row_TK, *here.handle, numbers)
        return Dispatched(here.x_RD, here.offs_E, here.probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, etp = world.group("ep"), world.group("etp")
        token_N, row_TK, token_R, row_R1, numbers = handle
        plan = Plan.of(numbers[: ep.size], numbers[ep.size :], etp.index)
        y_ND = plan.back(collect(y_RD, token_R, row_R1, True), ep, etp)
        return collect(y_ND, token_N, row_TK, complete)
