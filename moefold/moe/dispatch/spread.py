"""Dispatch without host reads, in two hops, with room for a fixed number of rows on each rank.

T rows, D hidden, K experts per token, E experts, P ranks of ``ep``, L copies per rank, N = P * L.

Each rank sorts its copies by expert and deals them round-robin to all ranks, in equal splits. Of
the copies for one destination, every rank thus gets equally many from each source, to within one:
in total 1 / P of the destination's rows, plus at most P. That bounds the equal splits of the second
hop for any routing (Valiant's two-phase routing, doi:10.1137/0211027, round-robin, not random).
"""

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.permute.gather import permute_rows, permute_values, unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Handle
from moefold.moe.dispatch.config import Spread
from moefold.moe.dispatch.padded import PaddedDispatch, all_to_all_equal, entry_of_row
from moefold.moe.dispatch.routing_plan import RoutedTokens, gather_counts, sort_copies


class SpreadDispatch(PaddedDispatch):
    """Deals token copies to the ranks of ``ep``, which forward them in equal splits."""

    _record: Spread

    def send(self, tokens: RoutedTokens, world: World) -> Dispatched:
        """Deal copies, derive the expert of each from all ranks' counts, and forward them."""
        x_TD, weights_TK, experts_TK, no_drop = tokens
        ep = world.group("ep")
        entries = experts_TK.shape[1]
        dealt = self._record.dealt_rows(ep.size)
        rows = ep.size * dealt
        order = sort_copies(experts_TK, self._experts, no_drop)
        place_TK = order.row_TK
        fits_TK = (experts_TK < self._experts) & (place_TK < rows)
        row_TK = place_TK % ep.size * dealt + place_TK.div(ep.size, rounding_mode="floor")
        row_TK = torch.where(fits_TK, row_TK, rows)
        copy_N = entry_of_row(row_TK, rows)
        token_N = copy_N // entries
        ends_PE = gather_counts(order.offs_B.to(torch.int64), world)[:, world.group("etp").index]
        place_L = torch.arange(dealt, device=x_TD.device) * ep.size + ep.index
        place_PL = place_L.expand(ep.size, -1).contiguous()
        experts_N1 = torch.searchsorted(ends_PE.contiguous(), place_PL, right=True).view(-1, 1)
        x_ND = all_to_all_equal(permute_rows(x_TD, token_N, row_TK), ep, self.wire)
        p_N = all_to_all_equal(permute_values(weights_TK, copy_N, row_TK), ep)
        sent = super().send(RoutedTokens(x_ND, p_N[:, None], experts_N1), world)
        assert sent.overflow is not None
        # To remove one row from a pair, the destination may have to lose P rows.
        overflow = torch.maximum(sent.overflow * ep.size, order.offs_B[-1] - rows)
        return sent._replace(handle=(token_N, row_TK, sent.handle), overflow=overflow)

    def fetch(self, y_RD: Tensor, handle: Handle, no_drop: bool, world: World) -> Tensor:
        """Send every row back by both hops, and sum the results of each token."""
        token_N, row_TK, second_hop = handle
        y_ND = super().fetch(y_RD, second_hop, no_drop, world)
        y_ND = all_to_all_equal(y_ND, world.group("ep"), self.wire, combine=True)
        return unpermute_rows(y_ND, token_N, row_TK)
