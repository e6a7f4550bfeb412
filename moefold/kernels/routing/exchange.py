"""Row counts of an expert exchange, and the order of received rows, as Triton kernels.

P ranks of ``ep``, S of ``etp``, B experts in total, e on this rank, X = S * P senders, R received
rows. Rows are received by sender, then by expert, and are needed by expert, then by sender, so that
their positions follow from counts without sorting.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

ELEMENTS = 512
"""Counts per program."""
COMPARISONS = 8192
WARPS = 8
"""Pairs of a row and a count that a program compares at once; warps of a program."""
MAX_COUNTS = 8192
"""Largest number of counts of a program: senders times experts on this rank, both padded."""


@jit
def _exchange_counts(
    ends, own_ends, row_counts, received,
    ranks, slices, local_experts, rank,
    SENDERS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count the rows sent to a block of ranks and received from a block of senders."""
    x = tl.program_id(0) * SENDERS + tl.arange(0, SENDERS)
    e = tl.arange(0, EXPERTS)
    end = tl.load(own_ends + x * local_experts + local_experts - 1, mask=x < ranks, other=0)
    start = tl.load(own_ends + x * local_experts - 1, mask=(x < ranks) & (x > 0), other=0)
    tl.store(row_counts + x, (end - start).to(tl.int64), mask=x < ranks)
    mask = (x < ranks * slices)[:, None] & (e < local_experts)[None, :]
    # Senders are numbered by slice, then by rank; gathered counts are ordered by rank first.
    offset = (x % ranks * slices + x // ranks) * (ranks * local_experts)
    expert = rank * local_experts + e
    end_ptrs = ends + offset[:, None] + expert[None, :]
    ends_xe = tl.load(end_ptrs, mask=mask, other=0)
    starts_xe = tl.load(end_ptrs - 1, mask=mask & (expert > 0)[None, :], other=0)
    count = ends_xe - starts_xe
    tl.store(received + x[:, None] * local_experts + e[None, :], count, mask=mask)
    total = tl.sum(count, 1).to(tl.int64)
    tl.store(row_counts + ranks + x, total, mask=x < ranks * slices)


@jit
def _sort_received(
    received, token, row, offs,
    rows, senders, experts,
    ROWS: tl.constexpr, SENDERS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Compute the position of each received row of a block."""
    x = tl.arange(0, SENDERS)[:, None]
    e = tl.arange(0, EXPERTS)[None, :]
    mask = (x < senders) & (e < experts)
    count = tl.load(received + x * experts + e, mask=mask, other=0)
    by_sender = tl.sum(count, 1)
    by_expert = tl.sum(count, 0)
    end = tl.cumsum(count, 1) + (tl.cumsum(by_sender, 0) - by_sender)[:, None]
    ends = tl.cumsum(by_expert, 0)
    if tl.program_id(0) < 1:
        lane = tl.arange(0, EXPERTS)
        tl.store(offs + lane, ends, mask=lane < experts)
    # Distance from a row's index among received rows to its position.
    shift = tl.cumsum(count, 0) + (ends - by_expert)[None, :] - end
    end = tl.reshape(end, (1, SENDERS * EXPERTS))
    shift = tl.reshape(shift, (1, SENDERS * EXPERTS))
    start = end - tl.reshape(count, (1, SENDERS * EXPERTS))
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    hit = (r[:, None] >= start) & (r[:, None] < end)
    position = (r + tl.sum(tl.where(hit, shift, 0), 1)).to(tl.int64)
    tl.store(row + r, position, mask=r < rows)
    tl.store(token + position, r.to(tl.int64), mask=r < rows)


def count_exchanged_rows(
    ends_PSB: Tensor, ends_B: Tensor, local_experts: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return the row counts that an exchange needs on the host, and counts by sender and expert.

    Args:
        ends_PSB: int32 ends of experts' rows on every rank.
        ends_B: int32 ends of experts' rows on this rank.
        local_experts: e, the experts of a rank.
        rank: index of this rank in P.

    Returns:
        int64 [P + X]: rows sent to each rank, then rows received from each sender, slice by slice;
        and int32 [X, e]: rows received for each expert.
    """
    results = _empty_counts(ends_PSB, ends_B, local_experts, rank)
    (ranks, slices, _) = ends_PSB.shape
    lanes = next_power_of_2(local_experts)
    senders = max(1, ELEMENTS // lanes)
    blocks = cdiv(ranks * slices, senders)
    _exchange_counts[(blocks,)](
        ends_PSB.contiguous(), ends_B, *results, ranks, slices, local_experts, rank, senders, lanes
    )
    return results


def sort_received_rows(received_Xe: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``token_R``, the row received for each position, its inverse, and int32 ends."""
    results = _empty_order(received_Xe, rows)
    senders, experts = received_Xe.shape
    padded = next_power_of_2(senders), next_power_of_2(experts)
    block = max(1, COMPARISONS // (padded[0] * padded[1]))
    _sort_received[(max(1, cdiv(rows, block)),)](
        received_Xe, *results, rows, senders, experts, block, *padded, num_warps=WARPS
    )
    return results


def fits(senders: int, experts: int) -> bool:
    """Return whether a program can process the counts of these senders and experts."""
    return next_power_of_2(senders) * next_power_of_2(experts) <= MAX_COUNTS


def _empty_counts(
    ends_PSB: Tensor, ends_B: Tensor, local_experts: int, rank: int
) -> tuple[Tensor, Tensor]:
    ranks, slices, _ = ends_PSB.shape
    row_counts = ends_B.new_empty(ranks * (1 + slices), dtype=torch.int64)
    return row_counts, ends_B.new_empty(slices * ranks, local_experts)


def _empty_order(received_Xe: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    token_R = received_Xe.new_empty(rows, dtype=torch.int64)
    return token_R, torch.empty_like(token_R), received_Xe.new_empty(received_Xe.shape[1])


exchange_counts = Op(count_exchanged_rows, _empty_counts)
sort_received = Op(sort_received_rows, _empty_order)
