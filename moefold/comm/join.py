"""Joins a rank to the others."""

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from moefold.comm.environment import Spot
from moefold.comm.store import PrefixStore, connect, serve_beside

MEET_S = 120.0
"""Ranks start at different moments: so long they wait for each other to be there at all."""


def join(
    spot: Spot, time_out_s: float, device: str = "cpu", meet_s: float = MEET_S
) -> torch.device:
    """Make the process group of all ranks: gloo on a CPU, NCCL on CUDA.

    Args:
        spot: this rank's place.
        time_out_s: how long ranks wait for each other, in every operation.
        device: ``cpu`` or ``cuda``; of several CUDA devices, the one of the local rank.
        meet_s: how long they wait to meet, at least the time-out.

    Returns:
        The device of this rank.

    Raises:
        ValueError: for a kind of device that no backend is known for, or more ranks on a machine
            than it has devices: NCCL takes one rank for each.
        RuntimeError: where the ranks do not all arrive in time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"ranks run on cpu or cuda, not on {device!r}")
    if not spot.served and spot.rank == 0:
        serve_beside(spot.port, time_out_s)
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", spot.local_rank)
        if spot.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {spot.rank} is number {spot.local_rank} of its machine, which has "
                f"{torch.cuda.device_count()} CUDA devices: start one rank for each, or run on "
                "the CPU with CUDA_VISIBLE_DEVICES= (empty)"
            )
        torch.cuda.set_device(here)
    meet_s = max(time_out_s, meet_s)
    store = PrefixStore(f"attempt {spot.attempt}", connect(spot.address, spot.port, meet_s))
    try:
        store.set(f"here/{spot.rank}", "")
        if store.add("here", 1) == spot.world:
            store.set("all here", "")
        store.wait(["all here"], timedelta(seconds=meet_s))
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=spot.rank,
            world_size=spot.world,
            timeout=timedelta(seconds=time_out_s),
        )
    except RuntimeError as error:
        raise RuntimeError(f"{_missing(store, spot.world)}: {error}") from error
    return here


def _missing(store: PrefixStore, world: int) -> str:
    """Word which ranks have not come, as far as the store still says."""
    with suppress(RuntimeError):
        absent = [rank for rank in range(world) if not store.check([f"here/{rank}"])]
        if absent:
            return f"ranks {', '.join(map(str, absent))} of {world} have not come in time"
    return "the ranks could not meet"
