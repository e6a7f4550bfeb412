"""The harness itself: answers come back in order, and no kind of failure hangs or passes."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.gloo.harness import RankError, run_ranks


def total(rank: int, factor: float) -> tuple[int, float, int]:
    x = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(x)
    return rank, x.item(), torch.get_num_threads()


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def stay_away(rank: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_answers_come_back_in_rank_order(world: int) -> None:
    expected = 2.0 * world * (world + 1) / 2
    assert run_ranks(total, world, 2.0) == [(rank, expected, 1) for rank in range(world)]


def test_what_a_rank_raises_is_reported() -> None:
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(raise_on_one, 2)


def test_a_rank_that_dies_is_reported() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 (died|was)|Connection|closed"):
        run_ranks(die_on_one, 2)
    assert time.monotonic() - started < 15


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RankError, match=r"no answer from ranks \[0, 1\]|Timed out|timeout"):
        run_ranks(stay_away, 2, time_out_s=2.0)
