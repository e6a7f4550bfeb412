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
    Row,
    ShardFile,
    header_entries,
    shard_header,
    spans,
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
    path, raw, found, problems = Path(path), b"", None, list[DamagedError]()
    try:
        raw = manifest.read_raw(path, disk)
        found = manifest.parse(raw, path)
    except DamagedError as error:
        problems.append(error)
        try:  # comparing shards with a damaged manifest shows which tensors' records are affected
            found = manifest.validate(raw, path)
        except DamagedError as further:
            if further.what != error.what and raw:
                problems.append(further)
    if found is None:
        return problems
    listed = {shard.file for shard in found.shards} | {manifest.FILE}
    for name in sorted(p.name for p in path.iterdir()):
        if name not in listed:
            problems.append(DamagedError(path, name, "is not part of the checkpoint"))
    for shard, rows in zip(found.shards, spans(found), strict=True):
        problems += _shard_problems(path, found, shard, rows, progress, disk)
    return problems


def _shard_problems(
    path: Path, found: Manifest, shard: ShardFile, rows: list[Row], progress: Progress, disk: Disk
) -> Iterator[DamagedError]:
    """Yield the defects of one shard: in its header, or in chunks of its slices."""
    try:
        check_size(path, shard, disk)
        fd = disk.open(path / shard.file)
    except (DamagedError, OSError) as error:
        what = error.what if isinstance(error, DamagedError) else f"cannot be read: {error}"
        held = sorted({name for name, _ in rows}) or [None]
        progress(shard.size)
        yield from (DamagedError(path, shard.file, what, name) for name in held)
        return
    try:
        raw = bytearray(shard.header)
        disk.read(fd, memoryview(raw), 0)
        for name, what in _header_problems(raw, found, shard, rows):
            yield DamagedError(path, shard.file, what, name)
        progress(shard.header)
        for name, part in rows:
            buffer = memoryview(bytearray(min(found.chunk_bytes, part.size)))
            for i, digest in enumerate(part.sha256):
                at = part.span[0] + i * found.chunk_bytes
                chunk = buffer[: min(part.span[1] - at, found.chunk_bytes)]
                count = disk.read(fd, chunk, at)
                if count < len(chunk) or sha256(chunk).hexdigest() != digest:
                    what = f"bytes {at} to {at + len(chunk)} do not match their SHA-256"
                    yield DamagedError(path, shard.file, what, name)
                progress(len(chunk))
    except OSError as error:
        yield DamagedError(path, shard.file, f"cannot be read: {error}")
    finally:
        disk.close(fd)


def _header_problems(
    raw: bytearray, found: Manifest, shard: ShardFile, rows: list[Row]
) -> Iterator[tuple[str | None, str]]:
    """Yield (tensor, defect) of a shard's header: altered bytes, or a contradiction."""
    slices = ((name, found.tensors[name], part) for name, part in rows)
    expected = header_entries((n, t.dtype, t.shape, s.at, s.shape) for n, t, s in slices)
    if sha256(raw).hexdigest() != shard.header_sha256:
        pairs = enumerate(zip(raw, shard_header(expected), strict=False))
        differs = next((i for i, (one, other) in pairs if one != other), len(raw))
        frame = len(shard_header({}).rstrip())
        hit, end = None, frame - 1  # position of the first entry's comma
        for (entry, held), (name, _) in zip(expected.items(), rows, strict=True):
            start, end = end, end + len(shard_header({entry: held}).rstrip()) - frame
            if start <= differs < end:
                hit = name
        yield hit, f"the header (bytes 0 to {shard.header}) does not match its SHA-256"
    elif bytes(raw) != shard_header(expected):
        differing: list[str | None] = [None]
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            told = {
                name: HeaderEntry(e["dtype"], tuple(e["shape"]), *e["data_offsets"])
                for name, e in json.loads(bytes(raw[8:])).items()
                if name != "__metadata__"
            }
            names = sorted(told.keys() | expected.keys())
            differing = [name for name in names if told.get(name) != expected.get(name)]
        yield from ((n, "the header and the manifest contradict each other") for n in differing)
