"""De-duplicated all-to-all: a token is sent once to each rank that has any of its experts.

T rows, D hidden, K experts per token, E experts, R rows after dispatch, N rows sent, P ranks of
``ep``, S of ``etp``. Rows sent are exactly the sum over tokens of their distinct ranks.
"""

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.permute.gather import collect
from moefold.moe.config import AllToAllOnce
from moefold.moe.dispatch.across import Across
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.counts import Plan, everyone, host_counts
from moefold.moe.dispatch.hop import Parcel, address, packed, ranks_of
from moefold.moe.dispatch.local import permute
from moefold.moe.router import count


class OnceDispatch(Across[AllToAllOnce]):
    """Tokens over ``ep``, copied where they arrive."""

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, complete: bool, world: World
    ) -> Dispatched:
        """Send rows; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, etp = world.group("ep"), world.group("etp")
        each, parcel = self._experts // ep.size, Parcel(x_TD, weights_TK, experts_TK)
        order, rank_TK = address(parcel, each, ep.size)
        copies_P = count(ranks_of(experts_TK, each), ep.size)
        coming_PS2P = everyone(torch.cat([order.counts_B, copies_P]), world).unflatten(2, (2, -1))
        rows_PS, copies_PS = coming_PS2P[:, :, :, ep.index].unbind(2)
        parts = [order.counts_B, rows_PS.t().flatten(), copies_PS.sum()[None]]
        *numbers, copies = host_counts(torch.cat(parts))
        plan = Plan.of(numbers[: ep.size], numbers[ep.size :], etp.index)
        order = order.first(sum(plan.send))
        sent = packed(parcel, order, rank_TK, each)
        arrived = Parcel(*(plan.out(part, ep, etp) for part in sent))
        here = permute(*arrived, each, False, copies)
        handle = (order.token_R, order.row_TK, *here.handle, numbers)
        return Dispatched(here.x_RD, here.offs_E, here.probs_R, handle)

    def fetch(self, y_RD: Tensor, handle: Handle, complete: bool, world: World) -> Tensor:
        """Bring results back; see :class:`~moefold.moe.dispatch.across.Across`."""
        ep, etp = world.group("ep"), world.group("etp")
        token_N, row_TK, token_R, row_NK, numbers = handle
        plan = Plan.of(numbers[: ep.size], numbers[ep.size :], etp.index)
        y_ND = plan.back(collect(y_RD, token_R, row_NK), ep, etp)
        return collect(y_ND, token_N, row_TK)
