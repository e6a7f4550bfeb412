"""Destinations of rows: copies sorted by destination, and counts exchanged between ranks.

T token rows, D hidden, K experts per token, B buckets (experts, ranks or nodes), R = T * K copies,
N rows sent, P ranks of ``ep``, S of ``etp``, C counts, X senders, E local experts.

A de-duplicated dispatch sends a token once to each rank with any of its experts, with its weights
and expert ids, numbered from the first expert of the destination rank (or node). Copies are made by
the receiver, which also sums results before it sends them back.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import RowCodec, all_to_all, gather, gather_rows, scatter_rows
from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.kernels.fused import device_uses_triton, uses_triton
from moefold.kernels.permute.gather import permute_rows, permute_values
from moefold.kernels.routing import exchange
from moefold.kernels.routing import fused as kernels


class RoutedTokens(NamedTuple):
    """Token rows with their routing weights and expert ids."""

    x_TD: Tensor
    weights_TK: Tensor
    """Differentiable routing weights; 0 for entries that are "none"."""
    experts_TK: Tensor
    """int64 expert ids, counted from the first reachable expert; one past the last is "none"."""
    no_drop: bool = False
    """Whether the host knows that no entry is "none"."""


class Permutation(NamedTuple):
    """Copies sorted by bucket, then by token; copies without a bucket come last."""

    token_R: Tensor
    """Token of each copy; T if it has no bucket."""
    copy_R: Tensor
    """Entry ``t * K + k`` of each copy."""
    row_TK: Tensor
    """Sorted position of each entry's copy; R if it has no bucket."""
    offs_B: Tensor
    """int32 end of each bucket."""

    @property
    def counts_B(self) -> Tensor:
        """int64 number of copies in each bucket."""
        ends_B = self.offs_B.to(torch.int64)
        return torch.diff(ends_B, prepend=ends_B.new_zeros(1))

    def first(self, rows: int) -> "Permutation":
        """Return only the first ``rows`` copies: those with a bucket."""
        return self._replace(token_R=self.token_R[:rows], copy_R=self.copy_R[:rows])

    def rows(self, x_TD: Tensor, no_drop: bool = False) -> Tensor:
        """Return the tokens' rows in this order; ``no_drop``: every copy has a bucket."""
        return permute_rows(x_TD, self.token_R, self.row_TK, no_drop)

    def entries(self, values_TK: Tensor, no_drop: bool = False) -> Tensor:
        """Return the entries' values in this order, differentiable; ``no_drop`` as in ``rows``."""
        return permute_values(values_TK, self.copy_R, self.row_TK, no_drop)


def sort_copies(buckets_TK: Tensor, buckets: int, no_drop: bool = False) -> Permutation:
    """Sort copies by bucket; an id of ``buckets``, one past the last, is "none".

    ``no_drop``: the host knows that no entry is "none".
    """
    if uses_triton(buckets_TK) and buckets <= kernels.MAX_BUCKETS:
        return Permutation(*kernels.order(buckets_TK, buckets))
    tokens, entries = buckets_TK.shape
    flat = buckets_TK.reshape(-1)
    # Narrow keys sort several times faster than int64 on every device.
    key = torch.int16 if buckets <= torch.iinfo(torch.int16).max else torch.int32
    sorted_R, copy_R = flat.to(key).sort(stable=True)
    row_TK = torch.empty_like(flat)
    row_TK[copy_R] = torch.arange(tokens * entries, device=flat.device)
    token_R = copy_R // entries
    if not no_drop:
        row_TK = torch.where(flat < buckets, row_TK, tokens * entries)
        token_R = torch.where(sorted_R < buckets, token_R, tokens)
    ids = torch.arange(buckets, dtype=key, device=flat.device)
    offs_B = torch.searchsorted(sorted_R, ids, right=True).to(torch.int32)
    return Permutation(token_R, copy_R, row_TK.view(tokens, entries), offs_B)


def gather_counts(counts_C: Tensor, world: World) -> Tensor:
    """All-gather counts [C] over the ranks of ``ep`` and ``etp`` to [P, S, C]."""
    sizes = world.folding.sizes
    return gather(counts_C, world.group("tp_ep")).view(sizes.ep, sizes.etp, -1)


def host_counts(counts: Tensor) -> Callable[[], list[int]]:
    """Start an asynchronous copy of counts to the host; the returned function waits for it.

    An exact dispatch reads nothing else on the host. The wait is for the counts alone: kernels
    launched after this call run while the host prepares the exchange.
    """
    if counts.device.type != "cuda":
        return counts.tolist
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return wait


def exchange_counts(order: Permutation, world: World) -> tuple[Tensor, Tensor]:
    """Exchange the counts of rows sorted by expert with all ranks that hold experts.

    Returns:
        int64 numbers for the host: rows to each rank of ``ep``, then rows from each of them, for
        each rank of ``etp`` in turn; and the rows [X, e] from each sender for each local expert.
    """
    sizes = world.folding.sizes
    rank = world.group("ep").index
    local = order.offs_B.shape[0] // sizes.ep
    if device_uses_triton(order.offs_B.device.type):
        ends_PSB = gather_counts(order.offs_B, world)
        return exchange.exchange_counts(ends_PSB, order.offs_B, local, rank)
    counts_B = order.counts_B
    counts_PSPe = gather_counts(counts_B, world).unflatten(2, (sizes.ep, -1))
    incoming_SPe = counts_PSPe[:, :, rank].transpose(0, 1)
    outgoing_P = counts_B.view(sizes.ep, -1).sum(1)
    numbers = torch.cat([outgoing_P, incoming_SPe.sum(2).flatten()])
    return numbers, incoming_SPe.flatten(0, 1)


def sort_received(counts_Xe: Tensor, rows: int) -> Permutation:
    """Return the permutation by expert of ``rows`` rows sorted by sender, then expert."""
    senders, experts = counts_Xe.shape
    if not (device_uses_triton(counts_Xe.device.type) and exchange.fits(senders, experts)):
        ids_X = torch.arange(experts, device=counts_Xe.device).repeat(senders)
        expert_R = ids_X.repeat_interleave(counts_Xe.flatten(), output_size=rows)
        return sort_copies(expert_R[:, None], experts, no_drop=True)
    token_R, row_R, offs_e = exchange.sort_received(counts_Xe, rows)
    return Permutation(token_R, token_R, row_R[:, None], offs_e)


class ExchangePlan(NamedTuple):
    """Split sizes of the all-to-all over ``ep`` and of the all-gather over ``etp``."""

    send: list[int]
    """Rows sent to each rank of the group."""
    receive: list[int]
    """Rows received from each rank of the group."""
    slices: list[int]
    """Rows received by each rank of ``etp``; each of these ranks needs all of them."""

    @classmethod
    def of(cls, send: list[int], incoming: list[int], etp: Group) -> "ExchangePlan":
        """Make a plan from counts; ``incoming``: rows from each rank, for each etp rank in turn."""
        ranks = len(send)
        slices = [incoming[i : i + ranks] for i in range(0, len(incoming), ranks)]
        return cls(send, slices[etp.index], [sum(rows) for rows in slices])

    def send_rows(
        self, x_ND: Tensor, group: Group, etp: Group, codec: RowCodec | None = None
    ) -> Tensor:
        """Send rows; return the experts' rows, gathered over ``etp``. Differentiable."""
        x_ND = all_to_all(x_ND, group, self.send, self.receive, codec)
        return gather_rows(x_ND, etp, self.slices, codec)

    def return_rows(
        self, y_RD: Tensor, group: Group, etp: Group, codec: RowCodec | None = None
    ) -> Tensor:
        """Reduce-scatter partial results over ``etp``, and send them back."""
        y_ND = scatter_rows(y_RD, etp, self.slices, codec)
        return all_to_all(y_ND, group, self.receive, self.send, codec, combine=True)


def rank_of_expert(experts_TK: Tensor, per_rank: int) -> Tensor:
    """Return each expert's rank, given ``per_rank`` consecutive experts per rank; P for "none"."""
    return experts_TK.div(per_rank, rounding_mode="floor")


def distinct_ranks(rank_TK: Tensor, ranks: int) -> Tensor:
    """Return each token's distinct ranks [T, K]; repetitions become ``ranks``, "none"."""
    entries = range(rank_TK.shape[1])
    repeated = [(rank_TK[:, :k] == rank_TK[:, k : k + 1]).any(1) for k in entries]
    return torch.where(torch.stack(repeated, 1), ranks, rank_TK)


def sort_tokens(tokens: RoutedTokens, per_rank: int, ranks: int) -> tuple[Permutation, Tensor]:
    """Return tokens sorted by rank, once per rank, and each token's distinct ranks [T, K]."""
    rank_TK = distinct_ranks(rank_of_expert(tokens.experts_TK, per_rank), ranks)
    return sort_copies(rank_TK, ranks), rank_TK


def pack(tokens: RoutedTokens, order: Permutation, rank_TK: Tensor, per_rank: int) -> RoutedTokens:
    """Return the rows to send in this order, with weights and ids for their destination only."""
    rank_N = rank_TK.flatten().index_select(0, order.copy_R)
    slot_NK = tokens.experts_TK.index_select(0, order.token_R) - rank_N[:, None] * per_rank
    sent_NK = (slot_NK >= 0) & (slot_NK < per_rank)
    weights_NK = torch.where(sent_NK, order.rows(tokens.weights_TK), 0)
    slot_NK = torch.where(sent_NK, slot_NK, per_rank)
    return RoutedTokens(order.rows(tokens.x_TD), weights_NK, slot_NK)
