"""The process that ranks fork from, which has imported what they need. Imports no torch itself.

It ends with the launcher, and ranks end with it, however the launcher ends: see
:mod:`moefold.comm.parent`. Its socket has no name in the file system, which a killed launcher could
not remove; the launcher connects to it through a descriptor.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process, resource_tracker, util
from typing import Any

from moefold.comm import parent
from moefold.comm.interrupt import block_signals_in_children
from moefold.comm.parent import signal_when_parent_ends
from moefold.config.slot import record_modules

PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
"""Modules that every rank would otherwise import by itself, the last of them in its backward."""
SOCKET_PATH_BYTES = 107
"""Most bytes of a socket's path on Linux."""
LAUNCHER = "MOEFOLD_LAUNCHER"
"""Variable by which a server that is starting knows its launcher's process id."""


def fork_server(*preload: str) -> Any:
    """Start the server that ranks fork from, unless there is one; return the context that forks.

    The server imports torch, ``preload``, and the modules of loaded records and of their owners,
    while the caller goes on.
    """
    context = multiprocessing.get_context("forkserver")
    if server_pid() is None:
        # The first module is this one, whose last lines tie the server to its launcher.
        context.set_forkserver_preload([__name__, *PRELOAD, *preload, *record_modules()])
        _call_in_lasting_thread(_start)
    return context


def server_pid() -> int | None:
    """Return the running server's process id; None if there is none."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return None
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return pid
    return None


def kill_server() -> None:
    """Kill the server, and with it all ranks: also a stopped one, which would never answer."""
    if (pid := server_pid()) is not None:
        os.kill(pid, signal.SIGKILL)


def _start() -> None:
    # If the server started the tracker, the tracker's signals would be unblocked.
    with _woken_children():
        resource_tracker.ensure_running()
    with _temporary_folder() as folder:
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            with block_signals_in_children():
                forkserver.ensure_running()
        finally:
            del os.environ[LAUNCHER]
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        if sys.platform == "linux" and server._forkserver_address.startswith(folder):
            held = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            server._forkserver_address = f"/proc/self/fd/{held}"


@contextmanager
def _woken_children() -> Iterator[None]:
    """Let processes that ``multiprocessing`` starts be continued when this process ends.

    The tracker of shared resources ends when its pipe closes, but not while it is stopped.
    """
    flags = util._args_from_interpreter_flags  # type: ignore[attr-defined]

    def with_parent() -> list[str]:
        return [*flags(), parent.__file__, str(os.getpid())]

    util._args_from_interpreter_flags = with_parent  # type: ignore[attr-defined]
    try:
        yield
    finally:
        util._args_from_interpreter_flags = flags  # type: ignore[attr-defined]


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Let ``multiprocessing`` create its socket in a new folder; on Linux, remove it at exit.

    A path in the system's folder may be too long for a socket; one in ``/tmp`` is short enough.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678"):
        parent = "/tmp"
    settings = process.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    folder = settings["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=parent)
    try:
        yield folder
    finally:
        settings["tempdir"] = before
        if sys.platform == "linux":
            shutil.rmtree(folder)
        else:  # The socket is needed until then.
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _call_in_lasting_thread(function: Callable[[], None]) -> None:
    """Call a function in a thread that lasts as long as the process.

    A process started there loses its parent when the launcher ends, and no sooner.
    """
    done = threading.Event()
    errors = list[BaseException]()

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        done.set()
        threading.Event().wait()

    threading.Thread(target=work, name="parent of the fork server", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]


if os.environ.get(LAUNCHER) == str(os.getppid()):  # This process is a server that is starting.
    signal_when_parent_ends(int(os.environ.pop(LAUNCHER)))
