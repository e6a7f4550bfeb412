"""Ranks that do not come to the first meeting are named."""

import time

import pytest
import torch
import torch.distributed as dist

from moefold.comm import rendezvous
from moefold.comm.environment import RankInfo
from moefold.comm.rendezvous import join, serve
from tests.gloo.harness import run_ranks
from tests.gloo.test_comm_launch import free_port


def alone(rank: int) -> str:
    dist.destroy_process_group()
    _store, port = serve("127.0.0.1", 0, 20.0)
    with pytest.raises(RuntimeError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "JOIN_TIME_OUT_S", 2.0)
        join(RankInfo(0, 3, 0, "127.0.0.1", port, store_running=True), 2.0)
    return str(caught.value)


def test_missing_ranks_are_named() -> None:
    """Case 40."""
    (said,) = run_ranks(alone, 1, time_out_s=60)
    assert said.startswith("ranks 1, 2 of 3 did not connect within")


def late(rank: int, port: int) -> float:
    dist.destroy_process_group()
    store = serve("127.0.0.1", port, 20.0) if rank == 0 else None
    time.sleep(2.5 * rank)
    join(RankInfo(rank, 2, rank, "127.0.0.1", port, store_running=True), 1.0)
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total)
    dist.barrier()
    del store
    return total.item()


def test_ranks_may_come_later_than_an_operation_may_take() -> None:
    """Processes start at different moments; the time-out is for what they do together."""
    assert run_ranks(late, 2, free_port(), time_out_s=60) == [11.0, 11.0]
