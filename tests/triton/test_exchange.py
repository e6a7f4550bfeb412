"""Kernels of counts that ranks exchange, and of the order of what arrives: to the bit."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.routing import exchange
from moefold.moe.dispatch.routing_plan import sort_received
from tests.triton.values import watched


def drawn(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "sizes", [(1, 1), (8, 16), (3, 5), (64, 4), (6, 1)], ids=lambda s: f"{s[0]} by {s[1]}"
)
@pytest.mark.parametrize("empty", (False, True), ids=("", "no rows"))
def test_what_arrives_stands_as_a_stable_sort_puts_it(sizes: tuple[int, int], empty: bool) -> None:
    counts_Xe = (drawn(*sizes) * (not empty)).to(torch.int32)
    counts_Xe[0, 0] = 0
    rows = int(counts_Xe.sum())
    with force_triton(False):
        want = sort_received(counts_Xe, rows)

    def ours() -> tuple[Tensor, ...]:
        return tuple(sort_received(counts_Xe, rows))

    for got, theirs in zip(watched(ours, whole=rows > 0, waste=None), want, strict=True):
        assert got.dtype == theirs.dtype and torch.equal(got, theirs)


def test_counts_of_more_senders_than_a_program_takes_go_the_plain_way() -> None:
    counts_Xe = torch.zeros(700, 9, dtype=torch.int64)
    counts_Xe[699, 8], counts_Xe[3, 0] = 1, 1
    with force_triton(True):
        assert sort_received(counts_Xe, 2).offs_B.tolist() == [1] * 8 + [2]


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("slices", (1, 2))
@pytest.mark.parametrize("local", (1, 5, 16))
def test_counts_between_ranks_are_differences_of_ends(local: int, slices: int, rank: int) -> None:
    ranks = 3
    counts_PSB = drawn(ranks, slices, ranks * local)
    ends_PSB = counts_PSB.cumsum(2).to(torch.int32)
    mine_B = ends_PSB[rank, slices - 1].clone()
    numbers, coming_Xe = watched(
        lambda: exchange.exchange_counts(ends_PSB, mine_B, local, rank), waste=None
    )
    going_P = counts_PSB[rank, slices - 1].view(ranks, local).sum(1)
    coming_SPe = counts_PSB[:, :, rank * local : (rank + 1) * local].transpose(0, 1)
    assert torch.equal(coming_Xe, coming_SPe.flatten(0, 1).to(torch.int32))
    assert torch.equal(numbers, torch.cat([going_P, coming_SPe.sum(2).flatten()]))


def test_torch_knows_the_operations() -> None:
    ends_PSB = drawn(2, 1, 6).cumsum(2).to(torch.int32)
    torch.library.opcheck(
        exchange.exchange_counts.overload, (ends_PSB, ends_PSB[0, 0].clone(), 3, 1)
    )
    counts_Xe = drawn(2, 3).to(torch.int32)
    torch.library.opcheck(exchange.sort_received.overload, (counts_Xe, int(counts_Xe.sum())))
