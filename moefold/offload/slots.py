"""Slots in host memory or in a file for tensors' values, and asynchronous copies to and from them.

With CUDA, host memory is pinned and each copy has its own stream. On a CPU the same code copies
between ordinary tensors and the pool, whose bytes are counted separately.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from moefold.offload.disk import BLOCK, DiskFile

THREADS = 2
"""Two, so that one can read while the other writes."""
Made = TypeVar("Made")


class HostPool:
    """Host memory for offloaded tensors.

    Attributes:
        bytes: bytes in use.
        peak: maximum of ``bytes`` so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned, self._lock = device.type == "cuda", threading.Lock()
        self.bytes = self.peak = 0

    def take(self, size: int) -> Tensor:
        """Allocate ``size`` bytes at an address that is a multiple of ``BLOCK``."""
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=self._pinned)
        start = -raw.data_ptr() % BLOCK
        self.adopt(size)
        return raw[start : start + size]

    def adopt(self, size: int) -> None:
        """Count bytes that are in host memory anyway; negative to stop counting them."""
        with self._lock:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def give(self, taken: Tensor) -> None:
        """Stop counting memory from :meth:`take`, which its last reference frees."""
        self.adopt(-taken.numel())


class Copies:
    """Asynchronous copies, executed by a pool of threads."""

    def __init__(self, device: torch.device, threads: int = THREADS) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(threads, "moefold offload")

    def begin(self, copy: Callable[[], Made]) -> "Future[Made]":
        """Start ``copy`` on another thread, ordered after the device's work queued so far.

        The future's ``result`` returns that of ``copy`` once all bytes are copied, or raises.
        """
        if self._device.type != "cuda":
            return self._threads.submit(self._made, copy)
        told = torch.cuda.Event()
        told.record()
        return self._threads.submit(self._made, copy, told)

    @torch.no_grad()
    def _made(self, copy: Callable[[], Made], told: torch.cuda.Event | None = None) -> Made:
        if told is None:
            return copy()
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(told)
            made = copy()
            stream.synchronize()
        return made


class HostSlot:
    """A slot in host memory for the bytes of one tensor."""

    def __init__(self, pool: HostPool, size: int) -> None:
        self._pool, self._values = pool, pool.take(size)

    def put(self, values: Tensor) -> None:
        """Copy bytes into the slot; return when the source may be overwritten."""
        self._values.copy_(values, non_blocking=True)
        finish(values)

    def get(self, into: Tensor) -> None:
        """Copy the slot's bytes out."""
        into.copy_(self._values, non_blocking=True)

    def held(self) -> Tensor:
        """Return the slot's bytes in host memory, for reading and writing."""
        return self._values

    def settle(self) -> None:
        """Do nothing: :meth:`held` returns the slot's own memory."""

    def free(self) -> None:
        """Free the slot."""
        self._pool.give(self._values)


class FileSlot:
    """A slot in a file for the bytes of one tensor, copied through a buffer in host memory."""

    def __init__(self, file: DiskFile, pool: HostPool, what: str, size: int) -> None:
        self._file, self._pool, self._slot = file, pool, file.slot(what, size)
        self._open: Tensor | None = None

    def put(self, values: Tensor) -> None:
        """Write bytes to the file."""
        self._close()
        passing = self._pool.take(self._slot.room)
        passing[: self._slot.size].copy_(values, non_blocking=True)
        finish(values)
        self._file.write(self._slot, passing.numpy().data)
        self._pool.give(passing)

    def get(self, into: Tensor) -> None:
        """Read bytes from the file."""
        self.settle()
        passing = self._pool.take(self._slot.room)
        self._file.read(self._slot, passing.numpy().data)
        into.copy_(passing[: self._slot.size], non_blocking=True)
        finish(into)
        self._pool.give(passing)

    def held(self) -> Tensor:
        """Return the bytes in host memory, read from the file and held until :meth:`settle`."""
        if self._open is None:
            self._open = self._pool.take(self._slot.room)
            self._file.read(self._slot, self._open.numpy().data)
        return self._open[: self._slot.size]

    def settle(self) -> None:
        """Write the bytes of :meth:`held`, which may have changed, to the file, and free them."""
        if self._open is not None:
            self._file.write(self._slot, self._open.numpy().data)
            self._close()

    def free(self) -> None:
        """Free the slot."""
        self._close()
        self._file.free(self._slot)

    def _close(self) -> None:
        if self._open is not None:
            self._pool.give(self._open)
            self._open = None


OffloadSlot = HostSlot | FileSlot
"""A slot for the bytes of one tensor."""


def finish(tensor: Tensor) -> None:
    """Wait until copies from or to a CUDA tensor on the current stream are complete."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
