"""Rendezvous: a store that runs outside the ranks, through which they join one another."""

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

from moefold.comm.environment import RankInfo

JOIN_TIME_OUT_S = 120.0
"""Least time-out for all ranks to join, since they start at different times."""
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
    """Connect to the store at an address, waiting until it responds."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=time_out_s))


def serve_in_subprocess(port: int, time_out_s: float) -> None:
    """Serve a store from a separate process, so that it works even while this rank is stopped.

    Raises:
        ValueError: if that fails, for example because the port is in use.
    """
    command = [sys.executable, "-m", "moefold.comm.rendezvous", str(port), str(time_out_s)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    assert server.stdout is not None
    if server.stdout.readline().strip() != READY:
        reason = server.communicate()[1].strip().rpartition("\n")[2]
        rule = "set MASTER_PORT to a free port, the same for all ranks"
        raise ValueError(f"ranks cannot connect at port {port}: {reason}; {rule}")
    atexit.register(server.communicate, DONE)


STORE_ADDRESS: dict[str, Any] = {}
"""Address and port of the store through which this process joined other ranks; empty before."""


def open_connection(time_out_s: float) -> TCPStore:
    """Open another connection to the store through which this process joined the others.

    Blocked operations of process groups do not block this connection.

    Raises:
        ValueError: if this process has not joined other ranks.
    """
    if not STORE_ADDRESS:
        raise ValueError("this process has not joined other ranks: call comm.rendezvous.join")
    return connect(**STORE_ADDRESS, time_out_s=time_out_s)


def cuda_device(info: RankInfo) -> torch.device:
    """Return a rank's CUDA device: the one numbered as its local rank, or the only visible one.

    With ``--gpus-per-task=1`` Slurm makes only a rank's own device visible to it, as number 0.

    Raises:
        ValueError: if a machine has more ranks than devices; NCCL takes one rank per device.
    """
    devices = torch.cuda.device_count()
    number = 0 if info.binds_devices and devices == 1 else info.local_rank
    if number >= devices:
        raise ValueError(
            f"rank {info.rank} needs CUDA device {number}, but its machine has {devices}; start "
            "one rank per device, or run on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return torch.device("cuda", number)


def join(info: RankInfo, time_out_s: float, device: str = "cpu") -> torch.device:
    """Create the process group of all ranks: gloo on CPU, NCCL on CUDA.

    Args:
        info: this rank's number, and the address of the store.
        time_out_s: time-out of every operation.
        device: ``cpu``, or ``cuda`` for the device of :func:`cuda_device`.

    Returns:
        The device of this rank.

    Raises:
        ValueError: for another kind of device, more ranks on a machine than it has devices, or a
            store that cannot be served at the port.
        RuntimeError: if not all ranks join in time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot run several ranks; use cpu or cuda")
    if not info.store_running and info.rank == 0:
        serve_in_subprocess(info.port, time_out_s)
    rank_device = torch.device("cpu")
    if device == "cuda":
        rank_device = cuda_device(info)
        torch.cuda.set_device(rank_device)
    join_s = max(time_out_s, JOIN_TIME_OUT_S)
    store = PrefixStore(f"attempt {info.attempt}", connect(info.address, info.port, join_s))
    try:
        store.set(f"here/{info.rank}", "")
        if store.add("here", 1) == info.world_size:
            store.set("all here", "")
        store.wait(["all here"], timedelta(seconds=join_s))
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=time_out_s),
        )
    except RuntimeError as error:
        what, absent = "the ranks could not connect", list[int]()
        with suppress(RuntimeError):  # The store may be down.
            absent = [rank for rank in range(info.world_size) if not store.check([f"here/{rank}"])]
        if absent:
            named = ", ".join(map(str, absent))
            what = f"ranks {named} of {info.world_size} did not connect within {join_s:g} s"
        raise RuntimeError(f"{what}: {error}") from error
    STORE_ADDRESS.update(address=info.address, port=info.port)
    return rank_device


def main(arguments: list[str]) -> None:
    """Serve a store at a port until the parent process closes standard input.

    If the parent fails, the store runs a little longer, so that other ranks can read reports.
    """
    store = serve(int(arguments[0]), float(arguments[1]))
    with open(os.devnull, "w") as devnull:  # nobody reads stderr: a log would fill the pipe
        os.dup2(devnull.fileno(), sys.stderr.fileno())
    print(READY, flush=True)
    if sys.stdin.read() != DONE:
        time.sleep(LINGER_S)
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
