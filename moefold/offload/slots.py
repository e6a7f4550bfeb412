"""Slots in host memory or in a file for tensors' values, and asynchronous copies to and from them.

With CUDA, host memory is pinned and each copy has its own stream. On a CPU the same code copies
between ordinary tensors and the pool, whose bytes are counted separately.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from moefold.offload.disk import BLOCK, DiskFile

THREADS = 2
"""Two, so that one can read while the other writes."""
Result = TypeVar("Result")


class HostPool:
    """Host memory for offloaded tensors.

    Attributes:
        bytes: bytes in use.
        peak: maximum of ``bytes`` so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._lock = threading.Lock()
        self.bytes = self.peak = 0

    def allocate(self, size: int) -> Tensor:
        """Allocate ``size`` bytes at an address that is a multiple of ``BLOCK``."""
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=self._pinned)
        start = -raw.data_ptr() % BLOCK
        self.count(size)
        return raw[start : start + size]

    def count(self, size: int) -> None:
        """Count bytes that are in host memory anyway; negative to stop counting them."""
        with self._lock:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def release(self, memory: Tensor) -> None:
        """Stop counting memory from :meth:`allocate`, which its last reference frees."""
        self.count(-memory.numel())


class AsyncCopies:
    """Asynchronous copies, executed by a pool of threads."""

    def __init__(self, device: torch.device, threads: int = THREADS) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(threads, "moefold offload")

    def start(self, copy: Callable[[], Result]) -> "Future[Result]":
        """Start ``copy`` on another thread, ordered after the device's work queued so far.

        The future's ``result`` returns that of ``copy`` once all bytes are copied, or raises.
        """
        if self._device.type != "cuda":
            return self._threads.submit(self._run, copy)
        queued = torch.cuda.Event()
        queued.record()
        return self._threads.submit(self._run, copy, queued)

    @torch.no_grad()
    def _run(self, copy: Callable[[], Result], queued: torch.cuda.Event | None = None) -> Result:
        if queued is None:
            return copy()
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(queued)
            result = copy()
            stream.synchronize()
        return result


class HostSlot:
    """A slot in host memory for the bytes of one tensor."""

    def __init__(self, pool: HostPool, size: int) -> None:
        self._pool = pool
        self._values = pool.allocate(size)

    def write(self, values: Tensor) -> None:
        """Copy bytes into the slot; return when the source may be overwritten."""
        self._values.copy_(values, non_blocking=True)
        synchronize(values)

    def read(self, into: Tensor) -> None:
        """Copy the slot's bytes out."""
        into.copy_(self._values, non_blocking=True)

    def host_values(self) -> Tensor:
        """Return the slot's bytes in host memory, for reading and writing."""
        return self._values

    def flush(self) -> None:
        """Do nothing: :meth:`host_values` returns the slot's own memory."""

    def free(self) -> None:
        """Free the slot."""
        self._pool.release(self._values)


class FileSlot:
    """A slot in a file for the bytes of one tensor, copied through a buffer in host memory."""

    def __init__(self, file: DiskFile, pool: HostPool, what: str, size: int) -> None:
        self._file = file
        self._pool = pool
        self._slot = file.allocate(what, size)
        self._buffer: Tensor | None = None

    def write(self, values: Tensor) -> None:
        """Write bytes to the file."""
        self._close()
        staging = self._pool.allocate(self._slot.capacity)
        staging[: self._slot.size].copy_(values, non_blocking=True)
        synchronize(values)
        self._file.write(self._slot, staging.numpy().data)
        self._pool.release(staging)

    def read(self, into: Tensor) -> None:
        """Read bytes from the file."""
        self.flush()
        staging = self._pool.allocate(self._slot.capacity)
        self._file.read(self._slot, staging.numpy().data)
        into.copy_(staging[: self._slot.size], non_blocking=True)
        synchronize(into)
        self._pool.release(staging)

    def host_values(self) -> Tensor:
        """Return the bytes in host memory, read from the file and held until :meth:`flush`."""
        if self._buffer is None:
            self._buffer = self._pool.allocate(self._slot.capacity)
            self._file.read(self._slot, self._buffer.numpy().data)
        return self._buffer[: self._slot.size]

    def flush(self) -> None:
        """Write the bytes of :meth:`host_values` back to the file, and free their memory."""
        if self._buffer is not None:
            self._file.write(self._slot, self._buffer.numpy().data)
            self._close()

    def free(self) -> None:
        """Free the slot."""
        self._close()
        self._file.free(self._slot)

    def _close(self) -> None:
        if self._buffer is not None:
            self._pool.release(self._buffer)
            self._buffer = None


OffloadSlot = HostSlot | FileSlot
"""A slot for the bytes of one tensor."""


def synchronize(tensor: Tensor) -> None:
    """Wait until copies from or to a CUDA tensor on the current stream are complete."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class MovedTensors:
    """Tensors whose values are in host memory; their own memory is free until they return.

    The tensor objects stay, and so do all views of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = HostPool(device)
        self._device = device
        self._slots: list[tuple[Tensor, int, HostSlot]] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    @torch.no_grad()
    def move_out(self, tensors: Iterable[Tensor]) -> int:
        """Move the storages of tensors on the device to host memory; return their bytes.

        Storages that have no memory, or are on another device, stay as they are.
        """
        for tensor in {storage_id(each): each for each in tensors}.values():
            size = tensor.untyped_storage().nbytes()
            if size and tensor.device.type == self._device.type:
                slot = HostSlot(self.pool, size)
                slot.write(storage_bytes(tensor))
                tensor.untyped_storage().resize_(0)
                self._slots.append((tensor, size, slot))
        return self.pool.bytes

    @torch.no_grad()
    def move_back(self) -> None:
        """Give all tensors memory on the device again, with their values; free the host's."""
        slots = self._slots
        self._slots = []
        for tensor, size, slot in slots:
            tensor.untyped_storage().resize_(size)
            slot.read(storage_bytes(tensor))
        for tensor, _, slot in slots:
            synchronize(tensor)
            slot.free()
