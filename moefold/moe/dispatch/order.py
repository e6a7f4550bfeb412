"""Copies of token rows sorted by where they go.

T token rows, D hidden, K entries per token, B buckets (experts or ranks), R = T * K copies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.permute.gather import pick, spread


class Order(NamedTuple):
    """Copies by bucket, inside a bucket by token; those for no bucket stand last."""

    token_R: Tensor
    """The token of each copy; T where it goes nowhere."""
    copy_R: Tensor
    """The entry ``t * K + k`` of each copy."""
    row_TK: Tensor
    """Where each entry's copy stands; R where there is none."""
    offs_B: Tensor
    """int32 end of each bucket."""

    @property
    def counts_B(self) -> Tensor:
        """int64 copies of each bucket."""
        ends_B = self.offs_B.to(torch.int64)
        return torch.diff(ends_B, prepend=ends_B.new_zeros(1))

    def first(self, rows: int) -> "Order":
        """Leave out the copies that stand last, as many as go nowhere."""
        return self._replace(token_R=self.token_R[:rows], copy_R=self.copy_R[:rows])

    def rows(self, x_TD: Tensor, complete: bool = False) -> Tensor:
        """Return the tokens' rows in this order; ``complete`` says that no copy goes nowhere."""
        return spread(x_TD, self.token_R, self.row_TK, complete)

    def entries(self, values_TK: Tensor) -> Tensor:
        """Return the entries' values in this order, differentiable."""
        return pick(values_TK, self.copy_R, self.row_TK)


def sort_copies(buckets_TK: Tensor, buckets: int, complete: bool = False) -> Order:
    """Sort copies by bucket.

    Args:
        buckets_TK: int64 bucket of each entry; ``buckets``, one past the last, for none.
        buckets: their number B.
        complete: the host knows that no entry says "none".
    """
    tokens, entries = buckets_TK.shape
    flat = buckets_TK.reshape(-1)
    # Narrow keys sort several times faster than int64 on every device.
    key = torch.int16 if buckets <= torch.iinfo(torch.int16).max else torch.int32
    sorted_R, copy_R = flat.to(key).sort(stable=True)
    row_TK = torch.empty_like(flat)
    row_TK[copy_R] = torch.arange(tokens * entries, device=flat.device)
    token_R = copy_R // entries
    if not complete:
        row_TK = torch.where(flat < buckets, row_TK, tokens * entries)
        token_R = torch.where(sorted_R < buckets, token_R, tokens)
    ids = torch.arange(buckets, dtype=key, device=flat.device)
    offs_B = torch.searchsorted(sorted_R, ids, right=True).to(torch.int32)
    return Order(token_R, copy_R, row_TK.view(tokens, entries), offs_B)
