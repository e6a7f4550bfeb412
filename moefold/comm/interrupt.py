"""Ctrl-C where a terminal sends it to several processes: one of them answers, at once.

The terminal interrupts every process of its group: the launcher, the server that ranks fork from,
and a rank that has no group of its own yet. Only the launcher is to hear it from there.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
    """Let processes that this thread starts hear no Ctrl-C until they call ``listen``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def listen() -> None:
    """Hear Ctrl-C from now on, and what came of it until now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
