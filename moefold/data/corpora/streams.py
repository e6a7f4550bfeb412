"""Files of text as streams of bytes: decompressed, with bounded lines, and other kinds refused.

What a file is follows from its first bytes, not from its name. Memory is bounded: a stream buffers
``READ_BYTES``, a decoder at most 128 MiB (a window) and what ``_FEED`` compressed bytes expand to
(at most 34 MB for zstd), and no line or document has more than ``MAX_DOCUMENT`` bytes.
"""

import gzip
import io
import lzma
import re
import tarfile
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moefold.data.config import DataError

READ_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""
MAX_DOCUMENT = 1 << 27
"""Maximum number of bytes of a line, of a document, or of a member of a tar."""
_MAX_WINDOW = 1 << 27
_FEED = 1024
_HEAD = 512
_ZSTD = "zstd"
TAR = "tar"
_NO_TEXT = "convert it to text, JSON lines or Parquet"


class OtherKind(DataError):
    """A file that is not a tar, where one was expected."""


class Kind(NamedTuple):
    """A kind of file, and what to do where text was expected."""

    name: str
    remedy: str
    is_table: bool = False


PARQUET = Kind("a Parquet file", "read it with source: parquet", is_table=True)
_ARROW = Kind("an Arrow file", "read it with source: parquet", is_table=True)
_MAGIC = (
    (rb"PAR1[\0-\x1f]", PARQUET),
    (rb"ARROW1\0\0|\xff\xff\xff\xff...\0", _ARROW),
    (rb"PK\x03\x04|PK\x05\x06", Kind("a zip archive", "unpack it, and name the files in it")),
    (rb"7z\xbc\xaf\x27\x1c", Kind("a 7z archive", "unpack it, and name the files in it")),
    (rb"Rar!\x1a\x07", Kind("a rar archive", "unpack it, and name the files in it")),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        Kind("a git LFS pointer", "fetch its content with: git lfs pull"),
    ),
    (
        rb"\xff\xfe|\xfe\xff",
        Kind("UTF-16 text", "convert it with: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    ),
    (rb"%PDF-", Kind("a PDF document", _NO_TEXT)),
    (rb"Obj\x01", Kind("an Avro file", _NO_TEXT)),
    (rb"ORC[\0-\x08\x0b\x0c\x0e-\x1f\x80-\xff]", Kind("an ORC file", _NO_TEXT)),
    (rb"\x89HDF\r\n", Kind("an HDF5 file", _NO_TEXT)),
    (rb"\x93NUMPY", Kind("a NumPy array", "read token files with source: indexed")),
    (rb"MMIDIDX\0\0", Kind("a token index", "read token files with source: indexed")),
    (rb"SQLite format 3\0", Kind("an SQLite database", _NO_TEXT)),
    (rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a", Kind("an image", _NO_TEXT)),
    (rb".{6}\0\0\{\"", Kind("a safetensors file", "name files of text")),
)
_TAR_KIND = Kind("a tar", "read it with source: webdataset, or unpack it and name the files in it")
_ZEROS = Kind("a file of zeros", "get a new copy")
_PACKED = {
    "gzip": rb"\x1f\x8b",
    _ZSTD: rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # the latter: a frame that is skipped
    "xz": rb"\xfd7zXZ\0",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
}
_SUFFIXES = {".gz": "gzip", ".tgz": "gzip", ".zst": _ZSTD, ".xz": "xz", ".bz2": "bzip2"}


def find_kind(head: bytes) -> Kind | None:
    """Return what a file is that begins with ``head`` (512 bytes); None if it may be text."""
    for pattern, kind in _MAGIC:
        if re.match(pattern, head, re.DOTALL):
            return kind
    if len(head) < _HEAD:
        return None
    if not any(head):
        return _ZEROS
    return _TAR_KIND if _begins_tar(head) else None


def is_tar(kind: Kind | None) -> bool:
    """Return whether a kind is that of tars."""
    return kind is _TAR_KIND


def _begins_tar(head: bytes) -> bool:
    if head[257:262] == b"ustar":
        return True
    try:  # tars of before 1988 have a checksum only
        tarfile.TarInfo.frombuf(head[:_HEAD], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def find_packing(head: bytes) -> str | None:
    """Return how a file that begins with ``head`` is compressed; None if it is not."""
    return next((name for name, magic in _PACKED.items() if re.match(magic, head)), None)


def read_head(path: Path) -> bytes:
    """Return a file's first 512 bytes."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


class _Decompressed(io.RawIOBase):
    """Decompresses a file of one or more streams, a few bytes of the file at a time."""

    def __init__(self, file: io.BufferedReader, start: Callable[[], Any]) -> None:
        self._file = file
        self._start = start
        self._decoder = start()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` completely unless the file ends; return the number of bytes."""
        filled = 0
        while filled < len(buffer) and (self._ready or self._decode()):
            part = self._ready[: len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            self._ready = self._ready[len(part) :]
            filled += len(part)
        return filled

    def _decode(self) -> bool:
        """Decompress until there are bytes; return whether there are any."""
        while not self._ready:
            if self._decoder.eof:
                data = self._decoder.unused_data.lstrip(b"\0")  # streams of xz may be padded
                data = data or self._file.read(_FEED)
                if not data:
                    return False
                if not data.strip(b"\0"):
                    continue
                self._decoder = self._start()
            elif not (data := self._file.read(_FEED)):
                raise EOFError("it is cut off within its compressed data")
            self._ready = memoryview(self._decoder.decompress(data))
        return True


def _decompress(path: Path, file: io.BufferedReader, packing: str) -> io.BufferedReader:
    if packing == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), READ_BYTES)  # type: ignore[arg-type]
    if packing == "xz":
        start = lambda: lzma.LZMADecompressor(memlimit=_MAX_WINDOW)  # noqa: E731
    elif packing == "bzip2":
        start = BZ2Decompressor
    else:
        try:
            zstandard = import_module("zstandard")
        except ModuleNotFoundError as error:
            raise DataError(
                f"{path}: is compressed with zstd, which needs zstandard "
                "(pip install 'moefold[zstd]'), or decompress it"
            ) from error
        start = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj
    return io.BufferedReader(_Decompressed(file, start), READ_BYTES)


@contextmanager
def open_stream(path: Path, tar: bool = False) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, decompressed if need be: text, or with ``tar`` a tar.

    Raises:
        DataError: if the content is of another kind or damaged, or cannot be read.
    """
    packing = _check_packing(path)
    # zstandard and lzma have errors of their own, which derive from Exception alone.
    try:
        with path.open("rb") as file:
            stream = _decompress(path, file, packing) if packing else file
            head = stream.peek(_HEAD)[:_HEAD]
            kind = find_kind(head)
            inside = packing and find_packing(head)
            if inside:
                raise DataError(f"{path}: is compressed twice; decompress it once, with {packing}")
            if tar and not is_tar(kind) and kind is not _ZEROS:
                raise OtherKind(f"{path}: is {kind.name if kind else 'text'}, not a tar")
            if kind and not tar:
                what = f"{kind.name} in {packing}" if packing else kind.name
                raise DataError(f"{path}: is {what}, not text; {kind.remedy}")
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: is damaged: {error}; get a new copy") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path}: {_zstd_problem(str(error))}") from error


def _zstd_problem(error: str) -> str:
    """Return what is wrong with a file, and what to do, by the library's error."""
    if "too much memory" in error:
        return "its window is too large: compress it again without --long or --ultra"
    if "ictionary" in error:
        return (
            "is compressed with a dictionary, which it does not contain; decompress it with: "
            "zstd -d -D DICTIONARY FILE"
        )
    return f"is damaged: {error}; get a new copy"


def holds_tar(path: Path) -> bool:
    """Return whether a file is a tar, compressed or not; raise ``DataError`` if it is damaged."""
    try:
        with open_stream(path, tar=True):
            return True
    except OtherKind:
        return False


def _check_packing(path: Path) -> str | None:
    """Return how a file is compressed; raise ``DataError`` if its name promises otherwise."""
    head = read_head(path)
    packing = find_packing(head)
    promised = _SUFFIXES.get(path.suffix)
    if promised and packing != promised:
        kind = find_kind(head)
        what = kind.name if kind else packing or "something else"
        raise DataError(
            f"{path}: is damaged: it is named {path.suffix}, but is {what}; get a new copy, or "
            "rename it"
        )
    return packing


def check_size(name: str, size: int, remedy: str) -> None:
    """Raise ``DataError`` if a document of ``size`` bytes exceeds ``MAX_DOCUMENT``."""
    if size > MAX_DOCUMENT:
        limit = f"{MAX_DOCUMENT >> 20} MiB, the most that one document may have"
        raise DataError(f"{name}: has more than {limit}; {remedy}")


def decode_utf8(data: bytes) -> str:
    """Decode UTF-8, without a byte order mark."""
    return data.removeprefix(b"\xef\xbb\xbf").decode()
