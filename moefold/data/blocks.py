"""Token files that are read block by block, each compared with its digest before it is used.

A file may change under a run: it may be overwritten, cut short, or lost by its disk. Reads go
through the file, not a memory map, so that whatever happens to it is an error of the read.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from moefold.data.config import DataError

BLOCK_BYTES = 4 << 20
"""Bytes of a file that share a digest; the last block may be shorter."""


class FileStamp(NamedTuple):
    """What the system says of a file, without reading it; any write changes it."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileStamp":
        """Return the stamp in the result of ``os.stat``."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)

    def change(self, now: "FileStamp") -> str:
        """Describe what differs in another stamp of the same path; empty if nothing does."""
        if now.inode != self.inode:
            return "was replaced by another file"
        if now.size != self.size:
            return f"has {now.size} bytes instead of {self.size}"
        return "was written to" if now.mtime_ns != self.mtime_ns else ""


class BlockDigests:
    """SHA-256 of each block of what is written, as hexadecimal text."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = sha256()
        self._filled = 0

    def update(self, data: bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._hash.hexdigest())
                self._hash = sha256()
                self._filled = 0

    def hexdigests(self) -> list[str]:
        """Return the digests of all bytes so far."""
        return [*self._done, self._hash.hexdigest()] if self._filled else list(self._done)


class CheckedFile:
    """A file whose bytes are returned only once their blocks have been compared with digests.

    Blocks are compared when they are first read, and again after the file was written to. Without
    ``digests`` bytes are returned as they are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests: list[str] | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        self.opened = self._stamp = FileStamp.of(os.fstat(self._fd))
        self._checked = bytearray()

    def __del__(self) -> None:
        if (fd := vars(self).pop("_fd", None)) is not None:
            os.close(fd)

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self.opened.size

    def expect(self, digests: Sequence[str]) -> None:
        """State the digest of each block.

        Raises:
            DataError: if the file has another number of blocks.
        """
        blocks = -(-self.size // BLOCK_BYTES)
        if len(digests) != blocks:
            raise DataError(
                f"{self.path}: has {self.size} bytes, but digests of {len(digests)} blocks of "
                f"{BLOCK_BYTES} were stored; restore the file, or prepare the data again"
            )
        self._digests = list(digests)
        self._checked = bytearray(blocks)

    def read(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start``.

        Raises:
            DataError: if they cannot be read, or differ from what the digests say.
        """
        if size <= 0:
            return b""
        last = (start + size - 1) // BLOCK_BYTES
        blocks = range(start // BLOCK_BYTES, last + 1)
        while True:
            if self._digests is not None and not all(self._checked[block] for block in blocks):
                data = b"".join(self._verified(block) for block in blocks)
                begin = start - blocks.start * BLOCK_BYTES
                return data[begin : begin + size]
            data = self._pread(start, size)
            now = FileStamp.of(os.fstat(self._fd))
            if now == self._stamp:
                return data
            if now.size != self.size:
                raise DataError(f"{self.path}: {self.opened.change(now)}; restore the file")
            self._stamp = now
            self._checked = bytearray(len(self._checked))
            if self._digests is None:
                return data

    def change(self) -> str:
        """Describe how the file at the path differs from the one that was opened, else nothing."""
        try:
            now = FileStamp.of(os.stat(self.path))
        except OSError as error:
            return f"cannot be found any more: {error.strerror}"
        return self.opened.change(now)

    def iter_digests(self) -> Iterator[str]:
        """Yield the digest of each block as the file is now."""
        for start in range(0, self.size, BLOCK_BYTES):
            size = min(BLOCK_BYTES, self.size - start)
            yield sha256(self._pread(start, size)).hexdigest()

    def _verified(self, block: int) -> bytes:
        """Return a block that has been compared with its digest."""
        assert self._digests is not None
        start = block * BLOCK_BYTES
        data = self._pread(start, min(BLOCK_BYTES, self.size - start))
        if sha256(data).hexdigest() != self._digests[block]:
            what = self.opened.change(FileStamp.of(os.fstat(self._fd)))
            since = f", and the file {what} since this start" if what else ""
            raise DataError(
                f"{self.path}: bytes {start} to {start + len(data)} are not those whose digest was "
                f"stored{since}; restore the file, or remove the prepared data to make it again"
            )
        self._checked[block] = 1
        return data

    def _pread(self, start: int, size: int) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            try:
                part = os.pread(self._fd, missing, start + size - missing)
            except OSError as error:
                at = start + size - missing
                text = f"{self.path}: byte {at} cannot be read: {error.strerror}"
                raise DataError(f"{text}; check the disk, or restore the file") from error
            if not part:
                left = os.fstat(self._fd).st_size
                raise DataError(
                    f"{self.path}: has {left} bytes instead of {self.size}; restore the file"
                )
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
