"""Rendezvous: a store that runs outside the ranks, through which they join one another.

All that ranks exchange at one meeting is under a number that rank 0 draws for it, so that entries
of an earlier start in the same store are never read: a launcher such as torchrun keeps its store
when it starts ranks again, and each of its agents counts restarts by itself.

The store is this package's (:mod:`moefold.comm.store`) where ranks share a secret, else the
``TCPStore`` of the launcher or of rank 0's machine.
"""

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moefold.comm.environment import SECRET, RankInfo, read_secret
from moefold.comm.parent import WAKE_SIGNAL, signal_when_parent_ends
from moefold.comm.store import SecretStore, Store, StoreServer, listen

JOIN_TIME_OUT_S = 120.0
"""Least time-out for all ranks to join, since they start at different times."""
LINGER_S = 5.0
READY = "ready"
DONE = "done"
LOOPBACK = "127.0.0.1"
LOOPBACKS = {LOOPBACK, "localhost", "::1"}
"""Addresses at which only ranks of one machine can meet."""
FIRST_POLL_S = 0.01
LAST_POLL_S = 0.5
"""Seconds between looks for a new meeting: they double from the first to the last."""
INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""Variables that name the network interface of gloo and NCCL, and the sign of an exact name."""

# torch has these without exporting them in its type stubs.
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


def connect(address: str, port: int, time_out_s: float, secret: bytes = b"") -> Store:
    """Connect to the store at an address, waiting until it responds."""
    if secret:
        return SecretStore(address, port, secret, time_out_s)
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=time_out_s))


def serve(address: str, port: int, time_out_s: float, secret: bytes = b"") -> tuple[Any, int]:
    """Serve a store to all machines, or to this one if its address is a loopback.

    Returns:
        What serves the store while it is referenced, and its port.
    """
    host = LOOPBACK if address in LOOPBACKS else ""
    if secret:
        server = StoreServer(secret, host, port)
        return server, server.port
    listening = listen(host, port)
    port = listening.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=time_out_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def serve_in_subprocess(address: str, port: int, time_out_s: float, secret: bytes = b"") -> int:
    """Serve a store from a separate process, so that it works even while this rank is stopped.

    Like :func:`serve`.

    Returns:
        The port, which is another one if it is 0.

    Raises:
        ValueError: if that fails, for example because the port is in use.
    """
    words = address, str(port), str(time_out_s)
    command = [sys.executable, "-m", "moefold.comm.rendezvous", *words]
    pipe = subprocess.PIPE
    env = os.environ | {SECRET: secret.decode(), PARENT: str(os.getpid())}
    server = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=env
    )
    assert server.stdout is not None
    word, _, served = server.stdout.readline().strip().partition(" ")
    if word != READY:
        reason = server.communicate()[1].strip().rpartition("\n")[2]
        rule = "set MASTER_PORT to a free port, the same for all ranks"
        raise ValueError(f"ranks cannot connect at port {port}: {reason}; {rule}")
    atexit.register(server.communicate, DONE)
    return int(served)


HELD: list[Store] = []
"""Connections of the present meeting. PyTorch's groups use them without holding a reference."""
CONNECTIONS: list[Callable[[float], Store]] = []
"""Opens another connection to what this process and the others exchange; empty before they met."""


def open_connection(time_out_s: float) -> Store:
    """Open another connection to the store through which this process joined the others.

    Blocked operations of process groups do not block this connection.

    Raises:
        ValueError: if this process has not joined other ranks.
    """
    if not CONNECTIONS:
        raise ValueError("this process has not joined other ranks: call comm.rendezvous.join")
    return CONNECTIONS[-1](time_out_s)


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
        ValueError: for another kind of device, more ranks on a machine than it has devices, a
            store that cannot be served at the port, or ranks that do not share one secret.
        RuntimeError: if not all ranks join in time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot run several ranks; use cpu or cuda")
    own_store = None
    if not info.store_running and info.rank == 0:
        serve_in_subprocess(info.address, info.port, time_out_s, info.secret)
    elif info.is_agents_store and info.secret and info.rank == 0:
        own_port = serve_in_subprocess(info.address, 0, time_out_s, info.secret)
        own_store = _own_address(info), own_port
    if info.address in LOOPBACKS:
        _stay_on_loopback()
    rank_device = torch.device("cpu")
    if device == "cuda":
        rank_device = cuda_device(info)
        torch.cuda.set_device(rank_device)
    join_s = max(time_out_s, JOIN_TIME_OUT_S)
    agents = b"" if info.is_agents_store else info.secret
    first = connect(info.address, info.port, join_s, agents)
    meeting = Meeting(PrefixStore(_prefix(info.meeting), first), info, join_s)
    round_, found = meeting.hold(own_store)
    address, port = found or (info.address, info.port)
    secret = info.secret if found else agents

    HELD.clear()

    def open_store(limit_s: float) -> Store:
        store = connect(address, port, limit_s, secret)
        HELD.append(store)
        return PrefixStore(_prefix(info.meeting, round_), store)

    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=open_store(join_s),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=time_out_s),
        )
    except RuntimeError as error:
        raise RuntimeError(f"the ranks could not connect: {error}") from error
    CONNECTIONS[:] = [open_store]
    return rank_device


def latest_meeting(store: Store) -> Store | None:
    """Return what the ranks that last met through a store exchange in it; None if none met."""
    first = PrefixStore(_prefix(0), store)
    if not first.check(["round"]):
        return None
    return PrefixStore(_prefix(0, json.loads(first.get("round"))[0]), store)


def _prefix(meeting: int, round_: str = "") -> str:
    """Return the prefix of a meeting's keys, or of those of one of its rounds."""
    return f"moefold/{meeting}" + f"/{round_}" * bool(round_)


class Meeting:
    """How ranks that start at different times agree on a number that no earlier start has used.

    Rank 0 draws the number of the round and publishes it. Every other rank announces itself under
    it with a number drawn by itself, and rank 0 answers with the list of all these: only a process
    that finds its own number there has met this rank 0. Whoever read the number of an earlier round
    waits until it changes.
    """

    def __init__(self, store: Store, info: RankInfo, limit_s: float) -> None:
        self._store = store
        self._info = info
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._own = secrets.token_hex(8)

    def hold(self, own_store: tuple[str, int] | None) -> tuple[str, tuple[str, int] | None]:
        """Wait for all ranks; return the round, and the address of rank 0's own store if any.

        Args:
            own_store: on rank 0, the address of the store in which everything else is exchanged.

        Raises:
            ValueError: if rank 0 has an own store and this rank no secret, or the reverse.
            RuntimeError: if not all ranks are there in time; names those that are not.
        """
        if self._info.rank == 0:
            return self._lead(own_store), own_store
        return self._follow()

    def _lead(self, own_store: tuple[str, int] | None) -> str:
        others = range(1, self._info.world_size)
        self._store.set("round", json.dumps([self._own, own_store]))
        keys = [f"{self._own}/here/{rank}" for rank in others]
        with suppress(RuntimeError):  # One is absent; who is, is found below.
            for key in keys:
                self._store.wait([key], timedelta(seconds=max(0.01, self._remaining_s())))
        absent = [rank for rank, key in zip(others, keys, strict=True) if not self._has(key)]
        if absent:
            raise self._missing(absent)
        present = [self._store.get(key).decode() for key in keys]
        self._store.set(f"{self._own}/all", json.dumps(present))
        return self._own

    def _follow(self) -> tuple[str, tuple[str, int] | None]:
        announced = ""
        poll_s = FIRST_POLL_S
        while self._remaining_s() > 0:
            if self._has("round"):
                round_, own_store = json.loads(self._store.get("round"))
                if round_ != announced:
                    self._store.set(f"{round_}/here/{self._info.rank}", self._own)
                    announced = round_
                    poll_s = FIRST_POLL_S
                if self._has(f"{round_}/all") and self._is_listed(round_):
                    return round_, self._address(own_store)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LAST_POLL_S)
        others = range(1, self._info.world_size)
        here = [rank for rank in others if self._has(f"{announced}/here/{rank}")]
        if announced and not self._has(f"{announced}/all"):
            raise self._missing([rank for rank in others if rank not in here])
        raise self._missing([0])

    def _is_listed(self, round_: str) -> bool:
        """Return whether rank 0 of a round has met this process."""
        return self._own in json.loads(self._store.get(f"{round_}/all"))

    def _address(self, own_store: list[Any] | None) -> tuple[str, int] | None:
        if own_store is not None and not self._info.secret:
            raise ValueError(f"{SECRET} is set for rank 0, but not for rank {self._info.rank}")
        if own_store is None and self._info.secret and self._info.is_agents_store:
            raise ValueError(f"{SECRET} is set for rank {self._info.rank}, but not for rank 0")
        return None if own_store is None else (str(own_store[0]), int(own_store[1]))

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _remaining_s(self) -> float:
        return self._until - time.monotonic()

    def _missing(self, ranks: list[int]) -> RuntimeError:
        named = ", ".join(map(str, ranks))
        limit = f"{self._limit_s:g} s"
        who = "rank" if len(ranks) == 1 else "ranks"
        return RuntimeError(
            f"{who} {named} of {self._info.world_size} did not connect within {limit}"
        )


def _own_address(info: RankInfo) -> str:
    """Return the address at which ranks reach this machine, as they do the agents' store."""
    with socket.create_connection((info.address, info.port), timeout=JOIN_TIME_OUT_S) as probe:
        host = str(probe.getsockname()[0])
    # If that store runs on this machine, its address is also this machine's.
    return info.address if host.startswith("127.") or host == "::1" else host


def _stay_on_loopback() -> None:
    """Let gloo and NCCL listen on the loopback interface only: no other machine has ranks."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable, exact in INTERFACES.items() if loopback else ():
        os.environ[variable] = f"{exact}{loopback}"


PARENT = "MOEFOLD_STORE_PARENT"
"""Variable by which the process that serves a store knows the rank that started it."""


def main(arguments: list[str]) -> None:
    """Serve a store at a port until the parent process closes standard input.

    If the parent fails, the store runs a little longer, so that other ranks can read reports; if
    this process is stopped then, it is continued.
    """
    signal_when_parent_ends(int(os.environ[PARENT]), WAKE_SIGNAL)
    address, wanted, time_out_s = arguments
    store, port = serve(address, int(wanted), float(time_out_s), read_secret(os.environ))
    with open(os.devnull, "w") as devnull:  # nobody reads stderr: a log would fill the pipe
        os.dup2(devnull.fileno(), sys.stderr.fileno())
    print(READY, port, flush=True)
    if sys.stdin.read() != DONE:
        time.sleep(LINGER_S)
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
