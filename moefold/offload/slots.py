"""Places for tensors' values away from the device, and copies there and back beside other work.

On a device memory of the host is pinned, and each copy has a stream. On a CPU the host's pool is
other memory than the tensors': bytes are counted apart, and the same code runs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from moefold.offload.disk import BLOCK, DiskFile

THREADS = 2
"""One that reads while the other writes."""
Made = TypeVar("Made")


class HostPool:
    """Memory of the host for what left the device.

    Attributes:
        bytes: taken and not given back.
        peak: the most of them so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned, self._lock = device.type == "cuda", threading.Lock()
        self.bytes = self.peak = 0

    def take(self, size: int) -> Tensor:
        """Return so many bytes, from an address that is a multiple of ``BLOCK``."""
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=self._pinned)
        start = -raw.data_ptr() % BLOCK
        self.adopt(size)
        return raw[start : start + size]

    def adopt(self, size: int) -> None:
        """Count bytes that lie in the host's memory anyway; below zero: no more."""
        with self._lock:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def give(self, taken: Tensor) -> None:
        """Give back what was taken."""
        self.adopt(-taken.numel())


class Copies:
    """Copies beside other work, begun by one thread and made by others."""

    def __init__(self, device: torch.device, threads: int = THREADS) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(threads, "moefold offload")

    def begin(self, copy: Callable[[], Made]) -> "Future[Made]":
        """Begin a copy of what the device has been told to compute so far, in the order of calls.

        Its ``result`` returns what ``copy`` does when every byte is where it belongs, or raises
        what went wrong.
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
    """A place for the bytes of one tensor in the host's memory."""

    def __init__(self, pool: HostPool, size: int) -> None:
        self._pool, self._values = pool, pool.take(size)

    def put(self, values: Tensor) -> None:
        """Copy bytes here from where they are; returns when they may be overwritten there."""
        self._values.copy_(values, non_blocking=True)
        finish(values)

    def get(self, into: Tensor) -> None:
        """Copy what is here."""
        into.copy_(self._values, non_blocking=True)

    def held(self) -> Tensor:
        """Return what is here as bytes in the host's memory, to be looked at and changed."""
        return self._values

    def settle(self) -> None:
        """Let what :meth:`held` returned go back to where it lies: it lies there."""

    def free(self) -> None:
        """Give the memory back."""
        self._pool.give(self._values)


class FileSlot:
    """A place in a file; what comes and goes passes memory of the host that is pinned."""

    def __init__(self, file: DiskFile, pool: HostPool, what: str, size: int) -> None:
        self._file, self._pool, self._slot = file, pool, file.slot(what, size)
        self._open: Tensor | None = None

    def put(self, values: Tensor) -> None:
        """Write bytes."""
        self._close()
        passing = self._pool.take(self._slot.room)
        passing[: self._slot.size].copy_(values, non_blocking=True)
        finish(values)
        self._file.write(self._slot, passing.numpy().data)
        self._pool.give(passing)

    def get(self, into: Tensor) -> None:
        """Read bytes."""
        self.settle()
        passing = self._pool.take(self._slot.room)
        self._file.read(self._slot, passing.numpy().data)
        into.copy_(passing[: self._slot.size], non_blocking=True)
        finish(into)
        self._pool.give(passing)

    def held(self) -> Tensor:
        """Read all into memory, where it stays until it settles."""
        if self._open is None:
            self._open = self._pool.take(self._slot.room)
            self._file.read(self._slot, self._open.numpy().data)
        return self._open[: self._slot.size]

    def settle(self) -> None:
        """Write what may have been changed in memory, and let that go."""
        if self._open is not None:
            self._file.write(self._slot, self._open.numpy().data)
            self._close()

    def free(self) -> None:
        """Give the room in the file back."""
        self._close()
        self._file.free(self._slot)

    def _close(self) -> None:
        if self._open is not None:
            self._pool.give(self._open)
            self._open = None


OffloadSlot = HostSlot | FileSlot
"""A place for the bytes of one tensor."""


def finish(tensor: Tensor) -> None:
    """Wait until the device has copied from or to a tensor."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
