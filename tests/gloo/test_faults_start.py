"""Ranks that do not come to the first meeting are named."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from moefold.comm.environment import Spot
from moefold.comm.join import join
from moefold.comm.store import serve
from tests.gloo.harness import run_ranks


def alone(rank: int) -> str:
    dist.destroy_process_group()
    store = serve(0, 20.0)
    store.set_timeout(timedelta(seconds=20))
    with pytest.raises(RuntimeError) as caught:
        join(Spot(0, 3, 0, "127.0.0.1", store.port, served=True), 2.0)
    return str(caught.value)


def test_missing_ranks_are_named() -> None:
    """Case 40."""
    (said,) = run_ranks(alone, 1, time_out_s=60)
    assert said.startswith("ranks 1, 2 of 3 have not come in time")
