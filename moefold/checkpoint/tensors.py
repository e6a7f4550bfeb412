"""Tensors as bytes: the data types there are, and blocks of bytes without a needless copy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moefold.checkpoint.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 64 * 2**20
"""Most bytes of a tensor that are copied to the host, or made contiguous, at once."""


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise ``CheckpointError`` naming the tensor where its values cannot be written."""
    check_dtype(name, tensor.dtype)
    if tensor.is_meta:
        raise CheckpointError(f"tensor {name!r} is on the meta device and has no values to save")
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise CheckpointError(f"tensor {name!r} is a {kind}; pass its plain, whole tensor")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ``CheckpointError`` naming the tensor where its data type has no place in a file."""
    if dtype not in NAMES:
        known = ", ".join(str(known).removeprefix("torch.") for known in NAMES)
        raise CheckpointError(f"tensor {name!r} is {dtype}; a checkpoint holds {known}")


class TensorSource:
    """A tensor's bytes, row-major, in blocks of at most ``BLOCK_BYTES``.

    A contiguous tensor in host memory is given out as it lies; anything else is copied block by
    block, so that no second copy of the tensor ever exists.
    """

    def __init__(self, tensor: Tensor, limit: int = BLOCK_BYTES) -> None:
        self.tensor = tensor.detach()
        self.limit = limit

    def blocks(self) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order."""
        for block in _blocks(self.tensor, self.limit):
            host = block.resolve_conj().resolve_neg().contiguous().cpu()
            if host.numel():
                yield host_bytes(host)
            del host  # before the next block is made, so that never two of them exist


@dataclass(frozen=True)
class Unread:
    """A tensor that is read only when it is written, so that not all need exist at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns the same values each time: a save that is tried again reads again."""

    def blocks(self) -> Iterator[memoryview]:
        """Read the tensor and yield its bytes in order."""
        tensor = self.read()
        assert (tensor.dtype, tuple(tensor.shape)) == (self.dtype, self.shape), tensor.shape
        yield from TensorSource(tensor).blocks()


@dataclass(frozen=True)
class Part:
    """A box of a tensor whose other boxes may lie on other ranks."""

    tensor: Tensor
    """The box's values."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    at: tuple[int, ...]
    """Place of the box's first element in the whole."""

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """First place and end along each dim."""
        ends = zip(self.at, self.tensor.shape, strict=True)
        return tuple((start, start + size) for start, size in ends)


def _blocks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield parts of at most ``limit`` bytes, in row-major order of the whole."""
    size = tensor.numel() * tensor.element_size()
    if size <= limit or tensor.numel() == 1:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, limit // tensor.element_size()))
    else:
        rows = max(1, limit // (size // len(tensor)))
        for part in tensor.split(rows):
            yield from _blocks(part[0] if len(part) == 1 else part, limit)


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, writable, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a host tensor with no values yet."""
    return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
