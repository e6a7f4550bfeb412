"""The store that all ranks meet at. It lives in the launcher, or in a process kept for it."""

import atexit
import subprocess
import sys
import time
from datetime import timedelta

import torch.distributed as dist

LINGER_S = 5.0
DONE = b"done"

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


def own_connection(time_out_s: float) -> Store:
    """Return a second connection to the store that this process's group was made with.

    A blocked operation of the group does not block it.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    mine = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    mine.set_timeout(timedelta(seconds=time_out_s))
    return mine


def serve_beside(port: int, time_out_s: float) -> None:
    """Serve a store from a process of its own: it answers while this rank is stopped."""
    command = [sys.executable, "-m", "moefold.comm.store", str(port), str(time_out_s)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(keeper.communicate, DONE)


def main(arguments: list[str]) -> None:
    """Serve a store at a port until the process at the other end of standard input is gone.

    Unless that ended well, the store stays a little longer: others still learn what happened.
    """
    store = serve(int(arguments[0]), float(arguments[1]))
    if sys.stdin.buffer.read() != DONE:
        time.sleep(LINGER_S)
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
