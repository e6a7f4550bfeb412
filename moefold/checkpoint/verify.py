"""Verifies every byte of a checkpoint against its manifest. Imports no torch."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from moefold.checkpoint import manifest
from moefold.checkpoint.disk import DISK, Disk
from moefold.checkpoint.errors import DamagedError
from moefold.checkpoint.folder import check_size
from moefold.checkpoint.manifest import (
    HeaderEntry,
    Manifest,
    ShardFile,
    ShardSlices,
    header_entries,
    shard_header,
    slices_by_shard,
)

Progress = Callable[[int], None]
"""Called with each further number of bytes that has been checked."""


def verify(
    path: str | Path, progress: Progress = lambda count: None, disk: Disk = DISK
) -> list[DamagedError]:
    """Return all defects of a checkpoint; an empty list means that every byte is correct.

    Reads each byte once, with one chunk in memory. Raises ``VersionError`` for a format that
    cannot be read, and ``CheckpointError`` if there is no checkpoint at all.
    """
    path = Path(path)
    raw = b""
    contents = None
    defects = list[DamagedError]()
    try:
        raw = manifest.read_raw(path, disk)
        contents = manifest.parse(raw, path)
    except DamagedError as error:
        defects.append(error)
        try:  # comparing shards with a damaged manifest shows which tensors' records are affected
            contents = manifest.validate(raw, path)
        except DamagedError as schema_error:
            if schema_error.what != error.what and raw:
                defects.append(schema_error)
    if contents is None:
        return defects
    listed = {shard.file for shard in contents.shards} | {manifest.FILE}
    for name in sorted(p.name for p in path.iterdir()):
        if name not in listed:
            defects.append(DamagedError(path, name, "is not part of the checkpoint"))
    for shard, slices in zip(contents.shards, slices_by_shard(contents), strict=True):
        defects += _shard_defects(path, contents, shard, slices, progress, disk)
    return defects


def _shard_defects(
    path: Path,
    contents: Manifest,
    shard: ShardFile,
    slices: ShardSlices,
    progress: Progress,
    disk: Disk,
) -> Iterator[DamagedError]:
    """Yield the defects of one shard: in its header, or in chunks of its slices."""
    try:
        check_size(path, shard, disk)
        fd = disk.open(path / shard.file)
    except (DamagedError, OSError) as error:
        what = error.what if isinstance(error, DamagedError) else f"cannot be read: {error}"
        names = sorted({name for name, _ in slices}) or [None]
        progress(shard.size)
        yield from (DamagedError(path, shard.file, what, name) for name in names)
        return
    try:
        raw = bytearray(shard.header)
        disk.read(fd, memoryview(raw), 0)
        for name, what in _header_defects(raw, contents, shard, slices):
            yield DamagedError(path, shard.file, what, name)
        progress(shard.header)
        for name, part in slices:
            buffer = memoryview(bytearray(min(contents.chunk_bytes, part.size)))
            for i, digest in enumerate(part.sha256):
                start = part.span[0] + i * contents.chunk_bytes
                chunk = buffer[: min(part.span[1] - start, contents.chunk_bytes)]
                count = disk.read(fd, chunk, start)
                if count < len(chunk) or sha256(chunk).hexdigest() != digest:
                    what = f"bytes {start} to {start + len(chunk)} do not match their SHA-256"
                    yield DamagedError(path, shard.file, what, name)
                progress(len(chunk))
    except OSError as error:
        yield DamagedError(path, shard.file, f"cannot be read: {error}")
    finally:
        disk.close(fd)


def _header_defects(
    raw: bytearray, contents: Manifest, shard: ShardFile, slices: ShardSlices
) -> Iterator[tuple[str | None, str]]:
    """Yield (tensor, defect) of a shard's header: altered bytes, or a contradiction."""
    named = ((name, contents.tensors[name], part) for name, part in slices)
    expected = header_entries((n, t.dtype, t.shape, s.at, s.shape) for n, t, s in named)
    if sha256(raw).hexdigest() != shard.header_sha256:
        pairs = enumerate(zip(raw, shard_header(expected), strict=False))
        altered = next((i for i, (byte, right) in pairs if byte != right), len(raw))
        frame = len(shard_header({}).rstrip())
        affected = None
        end = frame - 1  # position of the first entry's comma
        for (key, entry), (name, _) in zip(expected.items(), slices, strict=True):
            start = end
            end += len(shard_header({key: entry}).rstrip()) - frame
            if start <= altered < end:
                affected = name
        yield affected, f"the header (bytes 0 to {shard.header}) does not match its SHA-256"
    elif bytes(raw) != shard_header(expected):
        differing: list[str | None] = [None]
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            actual = {
                name: HeaderEntry(e["dtype"], tuple(e["shape"]), *e["data_offsets"])
                for name, e in json.loads(bytes(raw[8:])).items()
                if name != "__metadata__"
            }
            names = sorted(actual.keys() | expected.keys())
            differing = [name for name in names if actual.get(name) != expected.get(name)]
        yield from ((n, "the header and the manifest contradict each other") for n in differing)
