"""Signals that end a run in good order."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def heard(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Turn the first signal of a kind into a request to stop; a second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        request_stop(f"received {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
