"""A process that ends with its parent, also if it is stopped when the parent is killed.

A pipe that a thread polls does not reach a stopped process; a signal of the kernel does. Imports no
torch. As a program it runs code of others, who know nothing of this, and wakes it when the parent
ends: ``python parent.py PARENT -c CODE``.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Linux: the signal that the kernel sends to this process when its parent ends."""

WAKE_SIGNAL = signal.SIGCONT
"""For a process that ends by itself once it runs."""


def signal_when_parent_ends(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent ends.

    Only Linux has this; elsewhere nothing happens. The kernel takes the end of the thread that
    started this process for the end of the parent.

    Args:
        parent: process id of the parent, which may have ended already.
        number: the signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call.
        os.kill(os.getpid(), number)


def main(arguments: list[str]) -> None:
    """Run code in this process, which is continued when its parent ends."""
    parent, _, code = arguments
    signal_when_parent_ends(int(parent), WAKE_SIGNAL)
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    main(sys.argv[1:])
