"""Signals that end a run in good order, and what Ctrl-C is answered with."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from types import FrameType

from moefold.comm.interrupt import SILENT, Words, say
from moefold.training.hooks.base import JobView

WORDS = Words(
    "saving after this step; Ctrl-C again to stop now",
    "stopped; the steps since the last checkpoint are lost",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def heard(job: JobView) -> Iterator[None]:
    """Turn the first signal of a kind into a request to stop; a second ends the process at once.

    The first rank answers Ctrl-C, where no launcher of ours does; the second one is a
    ``KeyboardInterrupt``.
    """
    words = WORDS if job.world.rank == 0 and parent_process() is None else SILENT
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        job.request_stop(f"received {signal.Signals(number).name}")
        signal.signal(number, now if number == signal.SIGINT else signal.SIG_DFL)
        if number == signal.SIGINT and words.first:
            say(words.first)

    def now(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(words.second)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
