"""Ctrl-C where a terminal sends it to several processes: one of them answers, at once.

The terminal interrupts every process of its group: the launcher, the server that ranks fork from,
and a rank that has no group of its own yet. Only the launcher is to hear it from there.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop."""
ERRORS = 2
"""File descriptor that people read along with."""


class Words(NamedTuple):
    """What Ctrl-C is answered with; nothing where it is empty."""

    first: str = ""
    second: str = ""


SILENT = Words()


def say(text: str) -> None:
    """Write a line at once, from inside a signal handler too, below what stands on a terminal.

    A live bar that stands there is drawn again below.
    """
    start = "\n" if os.isatty(ERRORS) else ""
    os.write(ERRORS, f"{start}{text}\n".encode())


@contextmanager
def deaf_children() -> Iterator[None]:
    """Let processes that this thread starts hear no signals to stop until they call ``listen``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        listen()


def listen() -> None:
    """Hear signals to stop from now on, and those that came until now, each once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
