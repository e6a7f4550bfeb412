"""Tensors as bytes in safetensors shards: data types, slices of tensors, and writing them.

A shard has the safetensors format: 8 bytes of header length, a JSON header padded with spaces to a
multiple of 8, then the data without gaps. It is written here because the library needs all bytes
of a file in memory at once; the library can read the files.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moefold.checkpoint.disk import Disk
from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.manifest import ShardFile, StoredSlice, header_entries, shard_header

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 64 * 2**20
"""Most bytes of a tensor that are copied to the host, or made contiguous, at once."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is produced only when it is written, so that not all exist at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns equal values each time: a retried save calls it again."""


Values = TypeVar("Values", bound=Tensor | LazyTensor)


@dataclass(frozen=True)
class TensorSlice(Generic[Values]):
    """A box of a global tensor, possibly all of it; other boxes may be on other ranks."""

    tensor: Values
    """The box's values."""
    full_shape: tuple[int, ...]
    """Shape of the full tensor."""
    at: tuple[int, ...]
    """Global index of the box's first element."""

    @classmethod
    def of_full_tensor(cls, tensor: Values) -> "TensorSlice[Values]":
        """Return a slice that is a full tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * len(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize


def check_storable(name: str, tensor: Tensor | LazyTensor) -> None:
    """Raise ``CheckpointError`` if a tensor's values cannot be written."""
    if tensor.dtype not in DTYPE_NAMES:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointError(f"tensor {name!r} is {tensor.dtype}; it must be one of {legal}")
    if isinstance(tensor, LazyTensor):
        return
    if tensor.is_meta:
        raise CheckpointError(f"tensor {name!r} is on the meta device and has no values to save")
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise CheckpointError(f"tensor {name!r} is a {kind}; pass a whole, dense tensor")


def iter_blocks(tensor: Tensor, limit: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield a tensor's bytes, row-major, in blocks of at most ``limit`` bytes.

    A contiguous tensor in host memory is not copied; any other is copied block by block, so that no
    second copy of the whole tensor ever exists.
    """
    for block in _split(tensor.detach(), limit):
        host = block.resolve_conj().resolve_neg().contiguous().cpu()
        if host.numel():
            yield host_bytes(host)
        del host  # before the next block is made, so that two never coexist


def _split(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield parts of at most ``limit`` bytes, in the tensor's row-major order."""
    size = tensor.numel() * tensor.element_size()
    if size <= limit or tensor.numel() == 1:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, limit // tensor.element_size()))
    else:
        rows = max(1, limit // (size // len(tensor)))
        for part in tensor.split(rows):
            yield from _split(part[0] if len(part) == 1 else part, limit)


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, writable, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def allocate(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialised host tensor."""
    return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")


# ------------------------------------------------------------------------------- into shards

NamedSlice = tuple[str, TensorSlice]


def pack(slices: Iterable[NamedSlice], shard_bytes: int) -> list[list[NamedSlice]]:
    """Group named slices, in order, into shards of at most ``shard_bytes`` of data.

    A larger slice has its own shard. In a shard, slices are sorted by descending element size, so
    that each is aligned to its elements.
    """
    shards: list[list[NamedSlice]] = []
    filled = 0
    for name, part in slices:
        if not shards or (filled and filled + part.num_bytes > shard_bytes):
            shards.append([])
            filled = 0
        shards[-1].append((name, part))
        filled += part.num_bytes
    return [sorted(shard, key=lambda named: -named[1].tensor.dtype.itemsize) for shard in shards]


def write_shard(
    disk: Disk,
    path: Path,
    slices: Sequence[NamedSlice],
    chunk_bytes: int,
    shard: int,
    **metadata: str,
) -> tuple[ShardFile, list[StoredSlice]]:
    """Write one shard and sync it, with one block in memory at a time.

    Returns the records of the shard and its slices; ``shard`` is its index in the manifest.
    """
    entries = header_entries(
        (name, DTYPE_NAMES[part.tensor.dtype], part.full_shape, part.at, tuple(part.tensor.shape))
        for name, part in slices
    )
    assert len(entries) == len(slices), "entries have different names"
    header = shard_header(entries, **metadata)
    written = []
    fd = disk.create(path)
    try:
        disk.write(fd, memoryview(header))
        for (_, part), entry in zip(slices, entries.values(), strict=True):
            digests = tuple(_write_data(disk, fd, part, chunk_bytes))
            span = (len(header) + entry.start, len(header) + entry.stop)
            written.append(
                StoredSlice(at=part.at, shape=entry.shape, shard=shard, span=span, sha256=digests)
            )
        disk.sync(fd)
    finally:
        disk.close(fd)
    digest = sha256(header).hexdigest()
    size = len(header)
    size += sum(part.num_bytes for _, part in slices)
    return ShardFile(file=path.name, size=size, header=len(header), header_sha256=digest), written


def _write_data(disk: Disk, fd: int, part: TensorSlice, chunk_bytes: int) -> list[str]:
    """Write one slice and return the digest of each of its chunks."""
    digests: list[str] = []
    chunk_digest = sha256()
    filled = 0
    total = 0
    tensor = part.tensor.read() if isinstance(part.tensor, LazyTensor) else part.tensor
    actual, declared = ((t.dtype, tuple(t.shape)) for t in (tensor, part.tensor))
    assert actual == declared, f"{actual} was read, not {declared}"
    for block in iter_blocks(tensor):
        disk.write(fd, block)
        total += len(block)
        start = 0
        while start < len(block):
            stop = min(start + chunk_bytes - filled, len(block))
            chunk_digest.update(block[start:stop])
            filled += stop - start
            start = stop
            if filled == chunk_bytes:
                digests.append(chunk_digest.hexdigest())
                chunk_digest = sha256()
                filled = 0
        del block  # frees its memory before the next one is made
    if filled:
        digests.append(chunk_digest.hexdigest())
    assert total == part.num_bytes, f"{total} bytes of a slice were written, not {part.num_bytes}"
    return digests
