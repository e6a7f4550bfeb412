"""One plain file of a rank, in slots: what fits into no memory lies there while the process lasts.

The file has no name from the moment it is open, so that no end of the process leaves it behind.
Room is taken when a slot is, which is before the first step where slots last. Imports no torch.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL, EIO
from pathlib import Path
from zlib import crc32

from moefold.files import make_folder

BLOCK = 4096
"""Bytes that places, lengths and addresses are multiples of, as files without a cache need them."""


class OffloadError(OSError):
    """What was to lie on disk cannot be written or read, or is not as it was written.

    Args:
        text: where, and what is wrong.
        number: the system's number of it.
    """

    def __init__(self, text: str, number: int | None = EIO) -> None:
        super().__init__(number, text)

    def __str__(self) -> str:
        return self.strerror or ""


@dataclass(eq=False)
class DiskSlot:
    """A place in the file."""

    what: str
    """What lies there, for messages."""
    start: int
    size: int
    """Bytes that are used."""
    room: int
    """Bytes that there are, a multiple of ``BLOCK``."""
    digest: int | None = None
    """CRC-32 of what was written; None before anything was."""


class DiskFile:
    """A rank's file.

    Args:
        folder: where; it is made where it is not there. ``$NAME`` stands for a value of the
            machine's environment.
        rank: for messages.
        called: what it is, for messages.

    Attributes:
        bytes: of slots in use.
        peak: the most of them so far.

    Raises:
        OffloadError: where no file can be made.
    """

    def __init__(self, folder: str, rank: int, called: str = "the state's file") -> None:
        path = os.path.expandvars(folder)
        self._where, self._lock = f"rank {rank}, {called} in {path}", threading.Lock()
        if "$" in path:
            text = f"rank {rank}: no value for what the folder {path} names"
            raise OffloadError(text, EINVAL)
        try:
            make_folder(Path(path))
            plain, name = tempfile.mkstemp(prefix=f".moefold-{rank}-", dir=path)
            self._fd = _without_cache(name, plain)
            os.unlink(name)
        except OSError as error:
            text = f"{self._where} cannot be made: {error.strerror}"
            raise OffloadError(text, error.errno) from error
        weakref.finalize(self, os.close, self._fd)
        self._end = self.bytes = self.peak = 0
        self._free: dict[int, list[int]] = {}

    def slot(self, what: str, size: int) -> DiskSlot:
        """Take room for so many bytes.

        Raises:
            OffloadError: where the disk has none.
        """
        room = -(-size // BLOCK) * BLOCK
        with self._lock:
            free = self._free.get(room)
            start = free.pop() if free else self._end
            if start == self._end and room:
                with self._told(what, start, room):
                    _allocate(self._fd, start, room)
                self._end += room
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        return DiskSlot(what, start, size, room)

    def free(self, slot: DiskSlot) -> None:
        """Give a slot's room back.

        Raises:
            ValueError: for a slot that was given back before.
        """
        with self._lock:
            if slot.room < 0:
                raise ValueError(f"{self._where}: the slot of {slot.what} is freed twice")
            self._free.setdefault(slot.room, []).append(slot.start)
            self.bytes -= slot.size
            slot.room = -1

    def write(self, slot: DiskSlot, data: memoryview) -> None:
        """Write ``slot.room`` bytes from an address that is a multiple of ``BLOCK``."""
        slot.digest = crc32(data[: slot.size])
        done = 0
        while done < slot.room:
            rest, at = data[done : slot.room], slot.start + done
            with self._told(slot.what, at, slot.room - done):
                done += os.pwrite(self._fd, rest, at)

    def read(self, slot: DiskSlot, into: memoryview) -> None:
        """Read ``slot.room`` bytes to an address that is a multiple of ``BLOCK``.

        Raises:
            OffloadError: where there are fewer, or other bytes than were written.
        """
        done = 0
        while done < slot.room:
            rest, at = into[done : slot.room], slot.start + done
            with self._told(slot.what, at, slot.room - done):
                count = os.preadv(self._fd, [rest], at)
            if not count:
                raise OffloadError(
                    f"{self._where}: {done} of the {slot.room} bytes of {slot.what} are there"
                )
            done += count
        if slot.digest != crc32(into[: slot.size]):
            raise OffloadError(
                f"{self._where}: the {slot.size} bytes of {slot.what} are not as they were "
                "written; test the disk, then go on from the newest checkpoint"
            )

    @contextmanager
    def _told(self, what: str, start: int, size: int) -> Iterator[None]:
        """Raise an error of the system as one that says what it was about."""
        try:
            yield
        except OSError as error:
            text = f"{self._where}: {size} bytes of {what} at {start}: {error.strerror}"
            raise OffloadError(text, error.errno) from error


def _without_cache(name: str, plain: int) -> int:
    """Open the file again so that the system keeps no second copy of it, where that is possible."""
    try:
        found = os.open(name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system in memory has no such thing
        return plain
    os.close(plain)
    return found


def _allocate(fd: int, start: int, size: int) -> None:
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None:
        os.truncate(fd, start + size)
    else:
        allocate(fd, start, size)
