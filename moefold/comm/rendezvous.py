"""Rendezvous: a store that runs outside the ranks, and how each rank joins the others there."""

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
"""Seconds that ranks, which start at different times, wait at least for all to join."""
LINGER_S = 5.0
READY, DONE = "ready", "done"

# torch has these without exporting them in its type stubs.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve(port: int, time_out_s: float) -> TCPStore:
    """Serve a store from this process while the result is referenced; port 0 picks a free one."""
    limit = timedelta(seconds=time_out_s)
    return TCPStore("localhost", port, is_master=True, timeout=limit, wait_for_workers=False)


def connect(address: str, port: int, time_out_s: float) -> TCPStore:
    """Connect to the store at an address, waiting until it answers."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=time_out_s))


def serve_beside(port: int, time_out_s: float) -> None:
    """Serve a store from a separate process, so that it answers even while this rank is stopped.

    Raises:
        ValueError: if it fails, for example as the port is in use.
    """
    command = [sys.executable, "-m", "moefold.comm.rendezvous", str(port), str(time_out_s)]
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline().strip() != READY:
        said = keeper.communicate()[1].strip().rpartition("\n")[2]
        rule = "set MASTER_PORT to a free port, the same for all ranks"
        raise ValueError(f"ranks cannot connect at port {port}: {said}; {rule}")
    atexit.register(keeper.communicate, DONE)


MEETING: dict[str, Any] = {}
"""Address and port of the store at which this process joined other ranks; empty before."""


def own_connection(time_out_s: float) -> TCPStore:
    """Open a further connection to the store at which this process joined the others.

    Blocked operations of process groups do not block it.

    Raises:
        ValueError: if this process has not joined other ranks.
    """
    if not MEETING:
        raise ValueError("this process has not joined other ranks: call comm.rendezvous.join")
    return connect(**MEETING, time_out_s=time_out_s)


def cuda_device(spot: Spot) -> torch.device:
    """Return the CUDA device of a rank: that of its local rank, or the only one visible.

    With ``--gpus-per-task=1`` Slurm makes only its own device visible to each rank, as number 0.

    Raises:
        ValueError: if a machine has more ranks than devices; NCCL takes one rank per device.
    """
    devices = torch.cuda.device_count()
    number = 0 if spot.binds and devices == 1 else spot.local_rank
    if number >= devices:
        raise ValueError(
            f"rank {spot.rank} needs CUDA device {number}, but its machine has {devices}; start "
            "one rank per device, or run on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return torch.device("cuda", number)


def join(spot: Spot, time_out_s: float, device: str = "cpu") -> torch.device:
    """Create the process group of all ranks: gloo on CPU, NCCL on CUDA.

    Args:
        spot: this rank's number, and the store's address.
        time_out_s: time-out of every operation.
        device: ``cpu`` or ``cuda``; of several CUDA devices, that of :func:`cuda_device`.

    Returns:
        The device of this rank.

    Raises:
        ValueError: for another kind of device, more ranks on a machine than it has devices, or a
            store that cannot be served at the port.
        RuntimeError: if not all ranks join in time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot run several ranks; use cpu or cuda")
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
        what, absent = "the ranks could not connect", list[int]()
        with suppress(RuntimeError):  # The store may be gone.
            absent = [rank for rank in range(spot.world) if not store.check([f"here/{rank}"])]
        if absent:
            named = ", ".join(map(str, absent))
            what = f"ranks {named} of {spot.world} did not connect within {meet_s:g} s"
        raise RuntimeError(f"{what}: {error}") from error
    MEETING.update(address=spot.address, port=spot.port)
    return here


def main(arguments: list[str]) -> None:
    """Serve a store at a port until the parent process closes standard input.

    Unless the parent ended well, the store stays a little longer for other ranks to read reports.
    """
    store = serve(int(arguments[0]), float(arguments[1]))
    with open(os.devnull, "w") as nowhere:  # nobody reads stderr: a log would fill the pipe
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    print(READY, flush=True)
    if sys.stdin.read() != DONE:
        time.sleep(LINGER_S)
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
