"""The process that ranks fork from, which has imported what they need. Imports no torch itself."""

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir
from typing import Any

from moefold.comm.interrupt import block_signals_in_children
from moefold.config.slot import record_modules

PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
"""Modules that every rank would otherwise import by itself, the last of them in its backward."""
SOCKET_PATH_BYTES = 107
"""Most bytes of a socket's path on Linux."""


def fork_server(*preload: str) -> Any:
    """Start the server that ranks fork from, unless there is one; return the context that forks.

    The server imports torch, ``preload``, and the modules of loaded records and of their owners,
    while the caller goes on.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload, *record_modules()])
    resource_tracker.ensure_running()  # if the server started it, its signals would be unblocked
    temp_dir = tempfile.gettempdir()
    if len(os.fsencode(temp_dir)) > SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678"):
        # ``multiprocessing`` would create its sockets there; paths in ``/tmp`` are short enough.
        previous, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            get_temp_dir()  # created once, then cached by ``multiprocessing``
        finally:
            tempfile.tempdir = previous
    with block_signals_in_children():
        forkserver.ensure_running()
    return context
