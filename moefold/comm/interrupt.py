"""Ctrl-C with several processes: only the launcher handles it, at once.

The terminal interrupts every process of its group: the launcher, the server that ranks fork from,
and a rank that has no process group of its own yet. All but the launcher block the signal.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop."""
ERRORS = 2
"""File descriptor of standard error."""


class Words(NamedTuple):
    """Messages shown on the first and second Ctrl-C; none where empty."""

    first: str = ""
    second: str = ""


SILENT = Words()


def say(text: str) -> None:
    """Write a line to standard error at once, also from a signal handler.

    On a terminal it goes below a live progress bar, which is then drawn again.
    """
    start = "\n" if os.isatty(ERRORS) else ""
    os.write(ERRORS, f"{start}{text}\n".encode())


@contextmanager
def deaf_children() -> Iterator[None]:
    """Block stop signals in processes started inside the context, until they call ``listen``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        listen()


def listen() -> None:
    """Unblock stop signals; those pending are delivered, each once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
