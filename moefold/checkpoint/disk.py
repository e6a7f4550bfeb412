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

Result = TypeVar("Result")
Say = Callable[[str], None]
"""Logs a line."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
PASSING = FULL | {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
"""Transient storage errors, after which a retry may succeed."""
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP})


class Disk:
    """Operations of the file system; ``open`` and ``size`` refuse symbolic links."""

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
        full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves the drive's cache
        if full is None:
            os.fsync(fd)
        else:
            fcntl.fcntl(fd, full)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Return once the folder's entries are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:  # some network file systems lack the call
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, replacing a file at ``target``."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its contents."""
        shutil.rmtree(path)

    def free(self, path: Path) -> int:
        """Return the bytes available to ordinary users on the file system of ``path``."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def size(self, path: Path) -> int:
        """Return a regular file's bytes; ``OSError`` for a link, a pipe or a folder."""
        facts = os.lstat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return facts.st_size

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
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def wait(self, seconds: float) -> None:
        """Wait before another attempt."""
        time.sleep(seconds)


DISK = Disk()


def retried(
    op: Callable[[], Result], what: str, attempts: int, say: Say, disk: Disk = DISK
) -> Result:
    """Return ``op()``, retried after a pause on transient storage errors."""
    for attempt in range(1, attempts):
        try:
            return op()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            pause = 0.2 * 4**attempt
            say(f"{what}: attempt {attempt} of {attempts}: {error}; retrying in {pause:.1f} s")
            disk.wait(pause)
    return op()


def read_whole(disk: Disk, path: Path, limit: int) -> bytes:
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


def write_whole(disk: Disk, path: Path, *parts: bytes | memoryview) -> None:
    """Create a file from concatenated ``parts``, and return once it is on the medium."""
    fd = disk.create(path)
    try:
        for part in parts:
            disk.write(fd, memoryview(part))
        disk.sync(fd)
    finally:
        disk.close(fd)
