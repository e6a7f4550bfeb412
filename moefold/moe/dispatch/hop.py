"""A de-duplicated hop: a token goes once to each rank that has any of its experts.

T rows, D hidden, K experts per token, N rows sent, P ranks of the hop's group. With a row travel
its weights and experts, numbered from the first of the rank (or node) that it goes to. Copies are
made on arrival, and results added up before they are sent back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.moe.dispatch.order import Order, sort_copies


class Parcel(NamedTuple):
    """Rows, each with what has to be done with it."""

    x_TD: Tensor
    weights_TK: Tensor
    """Differentiable; 0 for an entry that is "none"."""
    experts_TK: Tensor
    """int64, numbered from the first expert that can be reached; their number says "none"."""


def ranks_of(experts_TK: Tensor, each: int) -> Tensor:
    """Return the rank of each expert, where neighbours sit ``each`` to a rank; P for "none"."""
    return experts_TK.div(each, rounding_mode="floor")


def distinct(rank_TK: Tensor, ranks: int) -> Tensor:
    """Return each token's ranks; ``ranks``, which says "none", for all but a first mention."""
    entries = range(rank_TK.shape[1])
    again = [(rank_TK[:, :k] == rank_TK[:, k : k + 1]).any(1) for k in entries]
    return torch.where(torch.stack(again, 1), ranks, rank_TK)


def address(parcel: Parcel, each: int, ranks: int) -> tuple[Order, Tensor]:
    """Return rows by rank, each token once for each of its ranks, and the ranks [T, K] named so."""
    rank_TK = distinct(ranks_of(parcel.experts_TK, each), ranks)
    return sort_copies(rank_TK, ranks), rank_TK


def packed(parcel: Parcel, order: Order, rank_TK: Tensor, each: int) -> Parcel:
    """Return the rows to send in an order whose last rows, which go nowhere, are left out."""
    rank_N = rank_TK.flatten().index_select(0, order.copy_R)
    slot_NK = parcel.experts_TK.index_select(0, order.token_R) - rank_N[:, None] * each
    there_NK = (slot_NK >= 0) & (slot_NK < each)
    weights_NK = torch.where(there_NK, order.rows(parcel.weights_TK), 0)
    return Parcel(order.rows(parcel.x_TD), weights_NK, torch.where(there_NK, slot_NK, each))
