"""Row counts of an expert exchange, and the order of received rows, as Triton kernels.

P ranks of ``ep``, S of ``etp``, B experts in total, e on this rank, X = S * P senders, R received
rows. Rows arrive ordered by sender, then by expert, and are needed by expert, then by sender, so
that their places follow from counts without sorting.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import Op, blocks, jit, power_of_2, tl

ELEMENTS = 512
"""Counts per program."""
HITS, WARPS = 8192, 8
"""Pairs of a row and a count that a program compares at once, and its warps."""
MOST_CELLS = 8192
"""Most counts of a program: senders times experts on this rank, both padded."""


@jit
def _counted(
    ends, mine, numbers, coming,
    ranks, slices, local, here,
    SENDERS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count the rows sent to some ranks and received from some senders."""
    x, e = tl.program_id(0) * SENDERS + tl.arange(0, SENDERS), tl.arange(0, EXPERTS)
    end = tl.load(mine + x * local + local - 1, mask=x < ranks, other=0)
    start = tl.load(mine + x * local - 1, mask=(x < ranks) & (x > 0), other=0)
    tl.store(numbers + x, (end - start).to(tl.int64), mask=x < ranks)
    there = (x < ranks * slices)[:, None] & (e < local)[None, :]
    # Senders are numbered by slice, then by rank; gathered counts are ordered by rank first.
    place = (x % ranks * slices + x // ranks) * (ranks * local)
    expert = here * local + e
    at = ends + place[:, None] + expert[None, :]
    ends_xe = tl.load(at, mask=there, other=0)
    starts_xe = tl.load(at - 1, mask=there & (expert > 0)[None, :], other=0)
    count = ends_xe - starts_xe
    tl.store(coming + x[:, None] * local + e[None, :], count, mask=there)
    total = tl.sum(count, 1).to(tl.int64)
    tl.store(numbers + ranks + x, total, mask=x < ranks * slices)


@jit
def _arrange(
    coming, token, row, offs,
    rows, senders, experts,
    ROWS: tl.constexpr, SENDERS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Compute the place of each received row of a block."""
    x, e = tl.arange(0, SENDERS)[:, None], tl.arange(0, EXPERTS)[None, :]
    there = (x < senders) & (e < experts)
    count = tl.load(coming + x * experts + e, mask=there, other=0)
    by_sender, by_expert = tl.sum(count, 1), tl.sum(count, 0)
    end = tl.cumsum(count, 1) + (tl.cumsum(by_sender, 0) - by_sender)[:, None]
    ends = tl.cumsum(by_expert, 0)
    if tl.program_id(0) < 1:
        lane = tl.arange(0, EXPERTS)
        tl.store(offs + lane, ends, mask=lane < experts)
    # Offset from a row's index among received rows to its place.
    shift = tl.cumsum(count, 0) + (ends - by_expert)[None, :] - end
    end, shift = tl.reshape(end, (1, SENDERS * EXPERTS)), tl.reshape(shift, (1, SENDERS * EXPERTS))
    start = end - tl.reshape(count, (1, SENDERS * EXPERTS))
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    hit = (r[:, None] >= start) & (r[:, None] < end)
    place = (r + tl.sum(tl.where(hit, shift, 0), 1)).to(tl.int64)
    tl.store(row + r, place, mask=r < rows)
    tl.store(token + place, r.to(tl.int64), mask=r < rows)


def rows_between(ends_PSB: Tensor, ends_B: Tensor, local: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the row counts that an exchange needs on the host, and counts by sender and expert.

    Args:
        ends_PSB: int32 ends of experts' rows on every rank.
        ends_B: int32 ends of experts' rows on this rank.
        local: experts e of a rank.
        rank: index of this rank in P.

    Returns:
        int64 [P + X]: rows sent to each rank, then rows received from each sender, slice by slice;
        and int32 [X, e]: rows received for each expert.
    """
    results = _counted_results(ends_PSB, ends_B, local, rank)
    (ranks, slices, _), lanes = ends_PSB.shape, power_of_2(local)
    senders = max(1, ELEMENTS // lanes)
    _counted[(blocks(ranks * slices, senders),)](
        ends_PSB.contiguous(), ends_B, *results, ranks, slices, local, rank, senders, lanes
    )
    return results


def order_arrived(coming_Xe: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``token_R``, the received row of each place, its inverse, and int32 experts' ends."""
    results = _arranged(coming_Xe, rows)
    senders, experts = coming_Xe.shape
    padded = power_of_2(senders), power_of_2(experts)
    block = max(1, HITS // (padded[0] * padded[1]))
    _arrange[(max(1, blocks(rows, block)),)](
        coming_Xe, *results, rows, senders, experts, block, *padded, num_warps=WARPS
    )
    return results


def fits(senders: int, experts: int) -> bool:
    """Return whether a program can process the counts of these senders and experts."""
    return power_of_2(senders) * power_of_2(experts) <= MOST_CELLS


def _counted_results(
    ends_PSB: Tensor, ends_B: Tensor, local: int, rank: int
) -> tuple[Tensor, Tensor]:
    ranks, slices, _ = ends_PSB.shape
    numbers = ends_B.new_empty(ranks * (1 + slices), dtype=torch.int64)
    return numbers, ends_B.new_empty(slices * ranks, local)


def _arranged(coming_Xe: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    token_R = coming_Xe.new_empty(rows, dtype=torch.int64)
    return token_R, torch.empty_like(token_R), coming_Xe.new_empty(coming_Xe.shape[1])


counted = Op(rows_between, _counted_results)
arrange = Op(order_arrived, _arranged)
