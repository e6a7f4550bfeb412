"""Ctrl-C with several processes: only the launcher handles it, at once.

The terminal interrupts every process of its group: the launcher, the server that ranks fork from,
and a rank that has not created its process group yet. All but the launcher block the signal.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that request a run to stop."""
STDERR_FD = 2
"""File descriptor of standard error."""


class Messages(NamedTuple):
    """Messages shown on the first and the second Ctrl-C; empty for none."""

    first: str = ""
    second: str = ""


NO_MESSAGES = Messages()


def write_stderr(text: str) -> None:
    """Write a line to standard error at once, also from a signal handler.

    On a terminal it goes below a live progress bar, which is then redrawn.
    """
    start = "\n" if os.isatty(STDERR_FD) else ""
    os.write(STDERR_FD, f"{start}{text}\n".encode())


@contextmanager
def block_signals_in_children() -> Iterator[None]:
    """Block stop signals in processes that start in this context, until ``unblock_signals``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield
    finally:
        unblock_signals()


def unblock_signals() -> None:
    """Unblock stop signals; pending ones are delivered, each once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
