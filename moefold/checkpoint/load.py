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
from moefold.checkpoint.disk import DISK, Disk, Say, retried
from moefold.checkpoint.errors import DamagedError
from moefold.checkpoint.folder import check_size
from moefold.checkpoint.manifest import ITEM_BYTES, StoredSlice, TensorMeta
from moefold.checkpoint.tensors import BLOCK_BYTES, DTYPES, empty, host_bytes
from moefold.layers.placement import Box, intersection, relative_slices

ATTEMPTS = 3
_log = logging.getLogger("moefold.checkpoint")


class Reader:
    """An open checkpoint, from which single tensors are read."""

    def __init__(self, path: str | Path, *, say: Say = _log.warning, disk: Disk = DISK) -> None:
        self.path = Path(path)
        self.manifest = manifest.read(self.path, disk)
        self._say = say
        self._disk = disk
        self._open = (-1, -1)
        """Number and descriptor of the shard that is open; at most one is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint in host memory."""
        stored = self.manifest.tensors[name]
        self.check_sizes([name])  # before memory is allocated for data that may be missing
        tensor = empty(stored.dtype, stored.shape)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor, at: tuple[int, ...] | None = None) -> None:
        """Fill ``target`` with a tensor of the checkpoint, or with its box that begins at ``at``.

        Only rows of slices that intersect the box are read, in whole chunks, which are verified. If
        a slice cannot be read into the target directly, some rows at a time are buffered.
        """
        stored, target = self.manifest.tensors[name], target.detach()
        at = (0,) * target.dim() if at is None else at
        box = tuple((a, a + n) for a, n in zip(at, target.shape, strict=True))
        for part in stored.slices:
            shared = intersection(part.box, box)
            if shared is None:
                continue
            there = target[relative_slices(shared, box)]
            plain = there.is_contiguous() and not there.is_conj() and not there.is_neg()
            if plain and there.shape == part.shape:
                bytes_ = there.view(-1).view(torch.uint8)
                self._read_chunks(name, part, 0, len(part.sha256), bytes_)
            elif not shared:
                value = empty(stored.dtype, ())
                self._read_chunks(name, part, 0, 1, value.view(-1).view(torch.uint8))
                there.copy_(value)
            else:
                self._read_box(name, part, shared, there)
        torch.autograd.graph.increment_version(target)  # invalidates copies of the old values

    def _read_box(self, name: str, part: StoredSlice, shared: Box, there: Tensor) -> None:
        """Fill ``there`` with the box ``shared``, in global indices, of a slice."""
        dtype, step = self.manifest.tensors[name].dtype, self.manifest.chunk_bytes
        columns, row = relative_slices(shared[1:], part.box[1:]), part.size // part.shape[0]
        first, end = (place - part.at[0] for place in shared[0])
        rows = max(1, BLOCK_BYTES // row)
        for start in range(first, end, rows):
            stop = min(start + rows, end)
            low, high = start * row // step, -(-stop * row // step)
            held = empty("U8", (min(high * step, part.size) - low * step,))
            self._read_chunks(name, part, low, high, held)
            found = held[start * row - low * step : stop * row - low * step]
            if found.storage_offset() % ITEM_BYTES[dtype]:
                found = found.clone()
            found = found.view(DTYPES[dtype]).view(stop - start, *part.shape[1:])
            there[start - first : stop - first].copy_(found[(slice(None), *columns)])

    def check_sizes(self, names: Iterable[str]) -> None:
        """Raise ``DamagedError`` if a shard of these tensors does not have its full size."""
        shards = {part.shard for name in names for part in self.manifest.tensors[name].slices}
        for number in sorted(shards):
            check_size(self.path, self.manifest.shards[number], self._disk)

    def _read_chunks(self, name: str, part: StoredSlice, low: int, high: int, into: Tensor) -> None:
        """Fill bytes, on any device, with chunks ``low`` to ``high`` of a slice."""
        step, file = self.manifest.chunk_bytes, self.manifest.shards[part.shard].file
        staging = None if into.device.type == "cpu" else empty("U8", (min(step, part.size),))
        for i in range(low, high):
            chunk = into[(i - low) * step : min((i + 1) * step, part.size) - low * step]
            host = chunk if staging is None else staging[: len(chunk)]
            start, digest, data = part.span[0] + i * step, part.sha256[i], host_bytes(host)
            try:
                read = partial(self._read_at, part.shard, start, data)
                what = f"reading {self.path / file}"
                count = retried(read, what, ATTEMPTS, self._say, self._disk)
            except OSError as error:
                raise DamagedError(self.path, file, f"cannot be read: {error}", name) from error
            stop = start + len(data)
            if count < len(data):
                what = f"ends at byte {start + count}, expected at least {stop} bytes"
                raise DamagedError(self.path, file, what, name)
            if (found := sha256(data).hexdigest()) != digest:
                hashes = f"have SHA-256 {found[:16]}…, expected {digest[:16]}…"
                what = f"bytes {start} to {stop} {hashes}; "
                raise DamagedError(self.path, file, what + manifest.USE_OLDER, name)
            if staging is not None:
                chunk.copy_(host)

    def _read_at(self, shard: int, offset: int, into: memoryview) -> int:
        """Read from a shard, which is opened if it is not the open one."""
        if self._open[0] != shard:
            self.close()
            path = self.path / self.manifest.shards[shard].file
            self._open = (shard, self._disk.open(path))
        try:
            return self._disk.read(self._open[1], into, offset)
        except OSError:
            self.close()  # a retry needs a new handle
            raise

    def close(self) -> None:
        """Close the open shard; a later read opens the one it needs."""
        number, fd = self._open
        self._open = (-1, -1)
        if number >= 0:
            self._disk.close(fd)


def difference(stored: TensorMeta, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return how a stored tensor differs from the wanted shape and dtype; empty if it fits."""
    if stored.shape == shape and DTYPES[stored.dtype] == dtype:
        return ""
    kind = str(DTYPES[stored.dtype]).removeprefix("torch.")
    wanted = str(dtype).removeprefix("torch.")
    return f"stored {kind} {list(stored.shape)}, expected {wanted} {list(shape)}"
