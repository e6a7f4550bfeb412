"""Where ranks meet: the store, which lives outside of them, and how each joins the others at it."""

import atexit
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moefold.comm.environment import Spot

MEET_S = 120.0
"""Ranks start at different moments: so long they wait for each other to be there at all."""
LINGER_S = 5.0
READY, DONE = "ready", "done"

# torch offers these without listing them.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve(port: int, time_out_s: float) -> TCPStore:
    """Serve a store from this process, for as long as the result lives; port 0 takes a free one."""
    limit = timedelta(seconds=time_out_s)
    return TCPStore("localhost", port, is_master=True, timeout=limit, wait_for_workers=False)


def connect(address: str, port: int, time_out_s: float) -> TCPStore:
    """Return a connection to the store at an address, waiting until it answers."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=time_out_s))


def serve_beside(port: int, time_out_s: float) -> None:
    """Serve a store from a process of its own: it answers while this rank is stopped.

    Raises:
        ValueError: where it cannot, as the port is taken.
    """
    command = [sys.executable, "-m", "moefold.comm.rendezvous", str(port), str(time_out_s)]
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline().strip() != READY:
        said = keeper.communicate()[1].strip().rpartition("\n")[2]
        rule = "name a free one as MASTER_PORT, the same for all ranks"
        raise ValueError(f"ranks cannot meet at port {port}, {rule}: {said}")
    atexit.register(keeper.communicate, DONE)


MEETING: dict[str, Any] = {}
"""Where this process has met the other ranks: address and port of their store, once it has."""


def own_connection(time_out_s: float) -> TCPStore:
    """Return a further connection to the store that this process joined the others at.

    A blocked operation of the group does not block it.

    Raises:
        ValueError: where it joined nobody.
    """
    if not MEETING:
        raise ValueError("this process has not joined other ranks: comm.rendezvous.join does that")
    return connect(**MEETING, time_out_s=time_out_s)


def cuda_device(spot: Spot) -> torch.device:
    """Return the CUDA device of a rank: the one of its place on its machine, or all that it sees.

    With ``--gpus-per-task=1`` Slurm shows each rank its own device alone, which is number 0 there.

    Raises:
        ValueError: for more ranks on a machine than it has devices: NCCL takes one rank for each.
    """
    devices = torch.cuda.device_count()
    number = 0 if spot.binds and devices == 1 else spot.local_rank
    if number >= devices:
        raise ValueError(
            f"rank {spot.rank} is number {number} of its machine, which has {devices} CUDA "
            "devices: start one rank for each, or run on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return torch.device("cuda", number)


def join(spot: Spot, time_out_s: float, device: str = "cpu") -> torch.device:
    """Make the process group of all ranks: gloo on a CPU, NCCL on CUDA.

    Args:
        spot: this rank's place.
        time_out_s: how long ranks wait for each other, in every operation.
        device: ``cpu`` or ``cuda``; of several CUDA devices, that of :func:`cuda_device`.

    Returns:
        The device of this rank.

    Raises:
        ValueError: for a kind of device that no backend is known for, or more ranks on a machine
            than it has devices: NCCL takes one rank for each; or where the ranks' port is taken.
        RuntimeError: where the ranks do not all arrive in time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"ranks run on cpu or cuda, not on {device!r}")
    if not spot.served and spot.rank == 0:
        serve_beside(spot.port, time_out_s)
    here = torch.device("cpu")
    if device == "cuda":
        here = cuda_device(spot)
        torch.cuda.set_device(here)
    meet_s = max(time_out_s, MEET_S)
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
        what, absent = "the ranks could not meet", list[int]()
        with suppress(RuntimeError):  # The store may be gone.
            absent = [rank for rank in range(spot.world) if not store.check([f"here/{rank}"])]
        if absent:
            named = ", ".join(map(str, absent))
            what = f"ranks {named} of {spot.world} have not come in time"
        raise RuntimeError(f"{what}: {error}") from error
    MEETING.update(address=spot.address, port=spot.port)
    return here


def main(arguments: list[str]) -> None:
    """Serve a store at a port until the process at the other end of standard input is gone.

    Unless that ended well, the store stays a little longer: others still learn what happened.
    """
    store = serve(int(arguments[0]), float(arguments[1]))
    with open(os.devnull, "w") as nowhere:  # nobody reads on: a log would fill the pipe and stop us
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    print(READY, flush=True)
    if sys.stdin.read() != DONE:
        time.sleep(LINGER_S)
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
