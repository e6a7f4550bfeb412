"""A rank's file for offloaded tensors, divided into slots, for the lifetime of the process.

The file is unlinked as soon as it is open, so it never outlives the process. Space is allocated
with each slot; for permanent slots that is before the first step. Imports no torch.
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
"""Alignment in bytes of offsets, lengths and addresses, as direct I/O requires."""


class OffloadError(OSError):
    """Offloaded data cannot be written to or read from disk, or was altered there.

    Args:
        text: where, and what is wrong.
        number: the system's error number.
    """

    def __init__(self, text: str, number: int | None = EIO) -> None:
        super().__init__(number, text)

    def __str__(self) -> str:
        return self.strerror or ""


@dataclass(eq=False)
class DiskSlot:
    """A range of the file."""

    content: str
    """Name of the content, for messages."""
    start: int
    size: int
    """Bytes used."""
    capacity: int
    """Bytes allocated, a multiple of ``BLOCK``; -1 once freed."""
    digest: int | None = None
    """CRC-32 of the content; None before the first write."""


class DiskFile:
    """A rank's file, from which slots are allocated.

    Args:
        folder: folder of the file, created if necessary; ``$NAME`` is replaced by an environment
            variable of the machine.
        rank: for messages.
        purpose: the file's purpose, for messages.

    Attributes:
        bytes: bytes of slots in use.
        peak: maximum of ``bytes`` so far.

    Raises:
        OffloadError: if the file cannot be created.
    """

    def __init__(self, folder: str, rank: int, purpose: str = "the state's file") -> None:
        path = os.path.expandvars(folder)
        self._where = f"rank {rank}, {purpose} in {path}"
        self._lock = threading.Lock()
        if "$" in path:
            text = f"rank {rank}: an environment variable in the folder {path} is not set"
            raise OffloadError(text, EINVAL)
        try:
            make_folder(Path(path))
            plain, name = tempfile.mkstemp(prefix=f".moefold-{rank}-", dir=path)
            try:  # direct I/O, which bypasses the page cache
                self._fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
            except OSError:  # a file system in memory does not support it
                self._fd = plain
            else:
                os.close(plain)
            os.unlink(name)
        except OSError as error:
            text = f"{self._where} cannot be created: {error.strerror}"
            raise OffloadError(text, error.errno) from error
        weakref.finalize(self, os.close, self._fd)
        self._end = self.bytes = self.peak = 0
        self._free: dict[int, list[int]] = {}

    def allocate(self, content: str, size: int) -> DiskSlot:
        """Allocate a slot of ``size`` bytes.

        Raises:
            OffloadError: if the disk is full.
        """
        capacity = -(-size // BLOCK) * BLOCK
        with self._lock:
            free = self._free.get(capacity)
            start = free.pop() if free else self._end
            if start == self._end and capacity:
                with self._converting_errors(content, start, capacity):
                    _allocate(self._fd, start, capacity)
                self._end += capacity
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        return DiskSlot(content, start, size, capacity)

    def free(self, slot: DiskSlot) -> None:
        """Free a slot.

        Raises:
            ValueError: if it was freed before.
        """
        with self._lock:
            if slot.capacity < 0:
                raise ValueError(f"{self._where}: the slot of {slot.content} is freed twice")
            self._free.setdefault(slot.capacity, []).append(slot.start)
            self.bytes -= slot.size
            slot.capacity = -1

    def write(self, slot: DiskSlot, data: memoryview) -> None:
        """Write ``slot.capacity`` bytes from an address that is a multiple of ``BLOCK``."""
        slot.digest = crc32(data[: slot.size])
        done = 0
        while done < slot.capacity:
            rest = data[done : slot.capacity]
            at = slot.start + done
            with self._converting_errors(slot.content, at, slot.capacity - done):
                done += os.pwrite(self._fd, rest, at)

    def read(self, slot: DiskSlot, into: memoryview) -> None:
        """Read ``slot.capacity`` bytes to an address that is a multiple of ``BLOCK``.

        Raises:
            OffloadError: if bytes are missing, or differ from those written.
        """
        done = 0
        while done < slot.capacity:
            rest = into[done : slot.capacity]
            at = slot.start + done
            with self._converting_errors(slot.content, at, slot.capacity - done):
                count = os.preadv(self._fd, [rest], at)
            if not count:
                size = f"only {done} of the {slot.capacity} bytes"
                raise OffloadError(f"{self._where}: {size} of {slot.content} remain")
            done += count
        if slot.digest != crc32(into[: slot.size]):
            raise OffloadError(
                f"{self._where}: the {slot.size} bytes of {slot.content} differ from those "
                "written; test the disk, then resume from the newest checkpoint"
            )

    @contextmanager
    def _converting_errors(self, content: str, start: int, size: int) -> Iterator[None]:
        """Convert an ``OSError`` to an :class:`OffloadError` that names the data."""
        try:
            yield
        except OSError as error:
            text = f"{self._where}: {size} bytes of {content} at offset {start}: {error.strerror}"
            raise OffloadError(text, error.errno) from error


def _allocate(fd: int, start: int, size: int) -> None:
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None:
        os.truncate(fd, start + size)
    else:
        allocate(fd, start, size)
