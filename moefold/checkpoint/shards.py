"""Safetensors shards: what goes into which file, the header, and writing without a copy.

The file is the safetensors format (8 bytes of header length, a JSON header padded with spaces to
a multiple of 8, then the data without gaps), written here because the library wants all bytes of
a file in memory at once. Its readers read these files.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from moefold.checkpoint.disk import Disk
from moefold.checkpoint.manifest import ITEM_BYTES, Manifest, Row, Shard, Slice, entry_name


class Source(Protocol):
    """Bytes of one slice, given out in order as blocks that stay valid until the next is asked."""

    def blocks(self) -> Iterator[memoryview]:
        """Yield the slice's bytes, row-major."""
        ...


@dataclass(frozen=True)
class Piece:
    """A slice that is to be written, and where its bytes come from."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]
    source: Source

    @property
    def size(self) -> int:
        """Bytes of the slice."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def entry(self) -> str:
        """The slice's name in its shard."""
        return entry_name(self.name, self.global_shape, self.at, self.shape)


@dataclass(frozen=True)
class Entry:
    """One line of a shard's header; ``start`` and ``stop`` count from the first data byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def plan(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Group pieces, in their order, into shards of at most ``shard_bytes`` of data.

    A larger piece has a shard of its own. Inside a shard wide elements come first, which keeps
    every tensor aligned to its element.
    """
    shards: list[list[Piece]] = []
    filled = 0
    for piece in pieces:
        if not shards or (filled and filled + piece.size > shard_bytes):
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece.size
    return [sorted(shard, key=lambda p: -ITEM_BYTES[p.dtype]) for shard in shards]


def header(entries: Mapping[str, Entry]) -> bytes:
    """Return a shard's bytes before its data, for entries in the order of the file."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, e in entries.items():
        offsets = [e.start, e.stop]
        fields[name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def entries_of(manifest: Manifest, base: int, rows: Sequence[Row]) -> dict[str, Entry]:
    """Return the entries of a shard's header, from the shard's ``spans`` and its header's bytes."""
    entries = {}
    for start, stop, name, part in rows:
        stored = manifest.tensors[name]
        entry = Entry(stored.dtype, part.shape, start - base, stop - base)
        entries[entry_name(name, stored.shape, part.at, part.shape)] = entry
    return entries


def write_shard(
    disk: Disk, path: Path, pieces: Sequence[Piece], chunk_bytes: int, shard: int
) -> tuple[Shard, list[tuple[Piece, Slice]]]:
    """Write one shard, on the medium when this returns; hold one block of it at a time.

    Returns the shard's record and each piece's, ``shard`` being its place in the manifest.
    """
    entries: dict[str, Entry] = {}
    end = 0
    for piece in pieces:
        entries[piece.entry] = Entry(piece.dtype, piece.shape, end, end + piece.size)
        end += piece.size
    assert len(entries) == len(pieces), "each entry has a name of its own"
    head = header(entries)
    written = []
    fd = disk.create(path)
    try:
        disk.write(fd, memoryview(head))
        for piece, entry in zip(pieces, entries.values(), strict=True):
            digests = _write_data(disk, fd, piece, chunk_bytes)
            span = (len(head) + entry.start, len(head) + entry.stop)
            part = Slice(
                at=piece.at, shape=piece.shape, shard=shard, span=span, sha256=tuple(digests)
            )
            written.append((piece, part))
        disk.sync(fd)
    finally:
        disk.close(fd)
    digest = sha256(head).hexdigest()
    size = len(head) + end
    record = Shard(file=path.name, size=size, header=len(head), header_sha256=digest)
    return record, written


def _write_data(disk: Disk, fd: int, piece: Piece, chunk_bytes: int) -> list[str]:
    """Write one piece and return the digest of each of its chunks."""
    digests: list[str] = []
    running, filled, total = sha256(), 0, 0
    for block in piece.source.blocks():
        disk.write(fd, block)
        total += len(block)
        start = 0
        while start < len(block):
            stop = min(start + chunk_bytes - filled, len(block))
            running.update(block[start:stop])
            filled += stop - start
            start = stop
            if filled == chunk_bytes:
                digests.append(running.hexdigest())
                running, filled = sha256(), 0
        del block  # its memory goes before the source makes the next one
    if filled:
        digests.append(running.hexdigest())
    assert total == piece.size, f"{piece.name} gave {total} bytes of {piece.size}"
    return digests
