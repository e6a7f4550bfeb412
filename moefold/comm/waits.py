"""Waits for gloo's operations so that a rank can leave them.

A rank that outlives others has to get out of an operation whose other end is gone. To cut its
connections fails most of them, but not one of which a message was under way: gloo forgets those
(``signalException`` in its ``transport/tcp/pair.cc`` tells neither what is being read nor what is
being sent), and they last until the time-out. So a second thread waits in place of the first,
which listens to it and to whoever calls it away.
"""

import threading
from queue import SimpleQueue
from typing import Protocol


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> object:
        """Return once it is done, or raise why it failed."""
        ...

    def is_completed(self) -> bool:
        """Say whether it is surely done."""
        ...


class CalledAwayError(RuntimeError):
    """A rank was called away from an operation that would not have ended."""

    def __init__(self) -> None:
        super().__init__("called away from an operation: another rank is lost")


class Waits:
    """The waits of a process, on any of its threads."""

    def __init__(self) -> None:
        """Begin as a process that nobody calls away: its threads wait themselves."""
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._others: set[_Other] = set()
        self._may_leave = self._left = False

    def may_leave(self) -> None:
        """Let waits be left from here on; what was called away before may wait again."""
        with self._lock:
            self._may_leave, self._left = True, False

    def leave(self) -> None:
        """Raise ``CalledAwayError`` on every thread that waits, and on those about to."""
        with self._lock:
            self._left = True
            for other in self._others:
                other.heard.put(CalledAwayError())

    def wait(self, work: Work) -> None:
        """Wait for an operation in host memory.

        Raises:
            RuntimeError: where the operation failed.
            CalledAwayError: where it is left.
        """
        if not self._may_leave or work.is_completed():
            work.wait()
            return
        other = self._begin()
        other.asked.put(work)
        del work
        error = other.heard.get()
        self._end(other)
        if error is not None:
            raise error

    def _begin(self) -> "_Other":
        with self._lock:
            if self._left:
                raise CalledAwayError
            other = getattr(self._mine, "other", None)
            if other is None:
                other = self._mine.other = _Other()
            self._others.add(other)
            return other

    def _end(self, other: "_Other") -> None:
        with self._lock:
            self._others.discard(other)
            if self._left:  # It may wait for long, and what it hears last is for nobody.
                del self._mine.other


class _Other:
    """A thread that waits in place of one that may be called away; it ends with that one's."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Work | None] = SimpleQueue()
        self.heard: SimpleQueue[Exception | None] = SimpleQueue()
        where = self.asked, self.heard
        threading.Thread(target=_wait_for_all, args=where, name="waits", daemon=True).start()

    def __del__(self) -> None:
        self.asked.put(None)


def _wait_for_all(
    asked: "SimpleQueue[Work | None]", heard: "SimpleQueue[Exception | None]"
) -> None:
    while (work := asked.get()) is not None:
        error = _error_of(work)
        # Nothing of an operation is held once it is over.
        del work
        heard.put(error)
        del error


def _error_of(work: Work) -> Exception | None:
    try:
        work.wait()
    except Exception as error:
        return error
    return None


WAITS = Waits()
"""Those of this process."""
