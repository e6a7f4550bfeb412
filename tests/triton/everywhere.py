"""Imported first, it has this process and all that fork from it run own kernels interpreted.

All rows go through own kernels, on every thread. Ranks fork from a server: where the environment
says ``TRITON_INTERPRET=1`` and this file is the first of what the server loads
(``moefold.comm.fork_server.PRELOAD``), they do so in every rank. With ``KERNELS_RUN`` a folder, an
empty file there names each kernel that ran.
"""

import os
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.interpreter import GridExecutor

from moefold.kernels import fused
from tests.triton import exact

ONE = threading.Lock()
"""The interpreter holds one launch at a time, and a rank has a thread for each of its lanes."""
_launch = GridExecutor.__call__


def _told(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    folder = os.environ.get("KERNELS_RUN")
    if folder:
        Path(folder, f"{self.fn.__module__}:{self.fn.__name__}").touch()
    with ONE:
        _launch(self, *args, **kwargs)


assert knobs.runtime.interpret and not fused.IMPORT_ERROR
GridExecutor.__call__ = _told
exact.install()
fused._FORCED = ContextVar("force_triton", default=True)
