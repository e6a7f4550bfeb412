"""Reading a checkpoint: only the parts requested, with each chunk verified as it is read.

Bytes are read directly into the tensor that is returned, so that no second copy exists.
"""

import logging
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moefold.checkpoint import manifest
from moefold.checkpoint.disk import DISK, Disk, Warn, retry
from moefold.checkpoint.errors import DamagedError
from moefold.checkpoint.folder import check_size
from moefold.checkpoint.manifest import ITEM_BYTES, StoredSlice, TensorMeta
from moefold.checkpoint.tensors import BLOCK_BYTES, DTYPES, allocate, host_bytes
from moefold.layers.placement import Box, intersection, relative_slices

ATTEMPTS = 3
_log = logging.getLogger("moefold.checkpoint")


class Reader:
    """An open checkpoint, from which single tensors are read."""

    def __init__(self, path: str | Path, *, warn: Warn = _log.warning, disk: Disk = DISK) -> None:
        self.path = Path(path)
        self.manifest = manifest.read(self.path, disk)
        self._warn = warn
        self._disk = disk
        self._open_shard = (-1, -1)
        """Number and descriptor of the shard that is open; at most one is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint in host memory."""
        stored = self.manifest.tensors[name]
        self.check_sizes([name])  # before memory is allocated for data that may be missing
        tensor = allocate(stored.dtype, stored.shape)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor, at: tuple[int, ...] | None = None) -> None:
        """Fill ``target`` with a tensor of the checkpoint, or with its box that begins at ``at``.

        Only rows of slices that intersect the box are read, in whole chunks, which are verified. If
        a slice cannot be read into the target directly, some rows at a time are buffered.
        """
        stored = self.manifest.tensors[name]
        target = target.detach()
        at = (0,) * target.dim() if at is None else at
        box = tuple((a, a + n) for a, n in zip(at, target.shape, strict=True))
        for part in stored.slices:
            overlap = intersection(part.box, box)
            if overlap is None:
                continue
            destination = target[relative_slices(overlap, box)]
            plain = destination.is_contiguous() and not destination.is_conj()
            plain = plain and not destination.is_neg()
            if plain and destination.shape == part.shape:
                data = destination.view(-1).view(torch.uint8)
                self._read_chunks(name, part, 0, len(part.sha256), data)
            elif not overlap:  # a scalar without plain memory
                value = allocate(stored.dtype, ())
                self._read_chunks(name, part, 0, 1, value.view(-1).view(torch.uint8))
                destination.copy_(value)
            else:
                self._read_box(name, part, overlap, destination)
        torch.autograd.graph.increment_version(target)  # invalidates copies of the old values

    def _read_box(self, name: str, part: StoredSlice, box: Box, destination: Tensor) -> None:
        """Fill ``destination`` with a box, in global indices, of a slice."""
        dtype = self.manifest.tensors[name].dtype
        chunk_bytes = self.manifest.chunk_bytes
        columns = relative_slices(box[1:], part.box[1:])
        row_bytes = part.size // part.shape[0]
        first, end = (index - part.at[0] for index in box[0])
        rows = max(1, BLOCK_BYTES // row_bytes)
        for start in range(first, end, rows):
            stop = min(start + rows, end)
            low = start * row_bytes // chunk_bytes
            high = -(-stop * row_bytes // chunk_bytes)
            offset = low * chunk_bytes
            buffer = allocate("U8", (min(high * chunk_bytes, part.size) - offset,))
            self._read_chunks(name, part, low, high, buffer)
            values = buffer[start * row_bytes - offset : stop * row_bytes - offset]
            if values.storage_offset() % ITEM_BYTES[dtype]:  # not aligned to its elements
                values = values.clone()
            values = values.view(DTYPES[dtype]).view(stop - start, *part.shape[1:])
            destination[start - first : stop - first].copy_(values[(slice(None), *columns)])

    def check_sizes(self, names: Iterable[str]) -> None:
        """Raise ``DamagedError`` if a shard of these tensors does not have its full size."""
        shards = {part.shard for name in names for part in self.manifest.tensors[name].slices}
        for number in sorted(shards):
            check_size(self.path, self.manifest.shards[number], self._disk)

    def _read_chunks(self, name: str, part: StoredSlice, low: int, high: int, into: Tensor) -> None:
        """Fill bytes, on any device, with chunks ``low`` to ``high`` (exclusive) of a slice."""
        size = self.manifest.chunk_bytes
        file = self.manifest.shards[part.shard].file
        staging = None if into.device.type == "cpu" else allocate("U8", (min(size, part.size),))
        for i in range(low, high):
            chunk = into[(i - low) * size : min((i + 1) * size, part.size) - low * size]
            host = chunk if staging is None else staging[: len(chunk)]
            start = part.span[0] + i * size
            expected = part.sha256[i]
            data = host_bytes(host)
            try:
                read = partial(self._read_at, part.shard, start, data)
                what = f"reading {self.path / file}"
                count = retry(read, what, ATTEMPTS, self._warn, self._disk)
            except OSError as error:
                raise DamagedError(self.path, file, f"cannot be read: {error}", name) from error
            stop = start + len(data)
            if count < len(data):
                what = f"ends at byte {start + count}, expected at least {stop} bytes"
                raise DamagedError(self.path, file, what, name)
            if (actual := sha256(data).hexdigest()) != expected:
                hashes = f"have SHA-256 {actual[:16]}…, expected {expected[:16]}…"
                what = f"bytes {start} to {stop} {hashes}; {manifest.USE_OLDER}"
                raise DamagedError(self.path, file, what, name)
            if staging is not None:
                chunk.copy_(host)

    def _read_at(self, shard: int, offset: int, into: memoryview) -> int:
        """Read from a shard, which is opened if it is not the open one."""
        if self._open_shard[0] != shard:
            self.close()
            path = self.path / self.manifest.shards[shard].file
            self._open_shard = (shard, self._disk.open(path))
        try:
            return self._disk.read(self._open_shard[1], into, offset)
        except OSError:
            self.close()  # a retry needs a new handle
            raise

    def close(self) -> None:
        """Close the open shard; a later read opens the one it needs."""
        number, fd = self._open_shard
        self._open_shard = (-1, -1)
        if number >= 0:
            self._disk.close(fd)


def describe_mismatch(stored: TensorMeta, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return how a stored tensor differs from the expected shape and dtype; empty if it fits."""
    if stored.shape == shape and DTYPES[stored.dtype] == dtype:
        return ""
    kinds = [str(kind).removeprefix("torch.") for kind in (DTYPES[stored.dtype], dtype)]
    return f"stored {kinds[0]} {list(stored.shape)}, expected {kinds[1]} {list(shape)}"
