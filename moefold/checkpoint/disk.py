"""The file operations that checkpoints use. Imports no torch.

All go through one object, so that tests can make each one fail, tear or block.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moefold.files import sync_folder

Result = TypeVar("Result")
Warn = Callable[[str], None]
"""Receives one warning."""

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
TRANSIENT = OUT_OF_SPACE | {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
"""Error codes of storage after which a retry may succeed."""


class Disk:
    """Operations of the file system; ``open`` and ``size`` raise ``OSError`` for symbolic links."""

    def make_folder(self, path: Path) -> None:
        """Create a folder that does not exist yet."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a file that does not exist yet and return a descriptor for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: memoryview) -> None:
        """Write all of ``data``."""
        while data:
            data = data[os.write(fd, data) :]

    def sync(self, fd: int) -> None:
        """Return once the file's content is on the medium."""
        command = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves the drive's cache
        if command is None:
            os.fsync(fd)
        else:
            fcntl.fcntl(fd, command)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Return once the folder's entries are on the medium."""
        sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, replacing a file at ``target``."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its contents."""
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes available to ordinary users on the file system of ``path``."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def size(self, path: Path) -> int:
        """Return a regular file's bytes; ``OSError`` for a link, a pipe or a folder."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return status.st_size

    def open(self, path: Path) -> int:
        """Open a regular file for reading and return its descriptor."""
        # O_NONBLOCK: opening a pipe does not wait for a writer
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset``; return the bytes read, fewer only at the file's end."""
        num_read = 0
        while num_read < len(into):
            count = os.preadv(fd, [into[num_read:]], offset + num_read)
            if count == 0:
                break
            num_read += count
        return num_read

    def wait(self, seconds: float) -> None:
        """Wait before another attempt."""
        time.sleep(seconds)


DISK = Disk()


def retry(
    operation: Callable[[], Result], what: str, attempts: int, warn: Warn, disk: Disk = DISK
) -> Result:
    """Return ``operation()``, called again after a pause on transient storage errors."""
    for attempt in range(1, attempts):
        try:
            return operation()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            pause = 0.2 * 4**attempt
            warn(f"{what}: attempt {attempt} of {attempts}: {error}; retrying in {pause:.1f} s")
            disk.wait(pause)
    return operation()


def read_file(disk: Disk, path: Path, limit: int) -> bytes:
    """Return a regular file's content; ``ValueError`` if it has more than ``limit`` bytes."""
    size = disk.size(path)
    if size > limit:
        raise ValueError(f"it has {size} bytes, more than the limit of {limit}")
    buffer = bytearray(size)
    fd = disk.open(path)
    try:
        count = disk.read(fd, memoryview(buffer), 0)
    finally:
        disk.close(fd)
    return bytes(buffer[:count])


def write_file(disk: Disk, path: Path, *parts: bytes | memoryview) -> None:
    """Create a file from concatenated ``parts``, and return once it is on the medium."""
    fd = disk.create(path)
    try:
        for part in parts:
            disk.write(fd, memoryview(part))
        disk.sync(fd)
    finally:
        disk.close(fd)
