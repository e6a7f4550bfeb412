"""Offloading of activations to host memory or disk between forward and backward.

A storage is copied once, for all its views, and prefetched before its layer's backward. Copies run
concurrently with compute, on threads and, with CUDA, on separate streams. Device memory is freed
when the copy is complete.
"""

import mmap
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from copy import copy
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from moefold.layers.config import Offload, OffloadToDisk, OffloadToHost, offloaded_layers
from moefold.layers.stash import PagedRows, PagedStash
from moefold.offload.disk import BLOCK, DiskFile, DiskSlot
from moefold.offload.slots import AsyncCopies, synchronize


class StoreStats:
    """Statistics of a store on one rank: bytes, and how often prefetching was in time."""

    def __init__(self) -> None:
        self.held = self.peak = self.moved = 0
        """Bytes held now, at most, and written in total."""
        self.reads = self.prefetched = 0
        """Number of reads, and of reads that found the data already on the device."""
        # Reentrant: any thread may free a storage, even an allocation within these methods.
        self._lock = threading.RLock()

    def add(self, size: int) -> None:
        """Count bytes that are written (positive) or released (negative)."""
        with self._lock:
            self.held += size
            self.moved += max(size, 0)
            self.peak = max(self.peak, self.held)

    def count_read(self, was_fetched: bool) -> None:
        """Count a read."""
        with self._lock:
            self.reads += 1
            self.prefetched += was_fetched


class HostStore:
    """Offloads to host memory, pinned for a GPU; base of every store.

    Each copy is a job on the store's threads; jobs run in the order of submission.
    """

    threads = 1

    def __init__(self, record: OffloadToHost, device: torch.device) -> None:
        self.record = record
        self._device = device
        self.stats = StoreStats()
        self._copies = AsyncCopies(device, self.threads)

    def write(self, data_N: Tensor) -> "Future[Any]":
        """Start to copy the bytes of a storage; the future returns where they are stored."""
        self.stats.add(data_N.numel())
        pending = [data_N]  # popped, because a job outlives its future for a moment
        return self._copies.start(lambda: self._write(pending.pop()))

    def read(self, written: "Future[Any]", into_N: Tensor) -> "Future[None]":
        """Start to copy bytes back, once they are written."""
        pending = [into_N]
        return self._copies.start(lambda: self._read(written, pending.pop()))

    def free(self, written: "Future[Any]", size: int) -> None:
        """Release bytes that will not be read any more."""
        self.stats.add(-size)
        written.add_done_callback(self._free)

    def _write(self, data_N: Tensor) -> Any:
        host_N = torch.empty(data_N.numel(), dtype=torch.uint8, pin_memory=data_N.is_cuda)
        host_N.copy_(data_N, non_blocking=True)
        synchronize(data_N)
        return host_N

    def _read(self, written: "Future[Any]", into_N: Tensor) -> None:
        into_N.copy_(written.result(), non_blocking=True)
        synchronize(into_N)

    def _free(self, written: "Future[Any]") -> None:
        """Free the stored bytes; host memory is freed with the future."""


class FileStore(HostStore):
    """Offloads to a file per rank, in size classes at most an eighth larger than needed."""

    threads = 2

    def __init__(self, record: OffloadToDisk, device: torch.device, rank: int) -> None:
        super().__init__(record, device)
        self._file = DiskFile(record.folder, rank, "the activations' file")
        self._own = threading.local()
        probe = self._write(torch.ones(BLOCK, dtype=torch.uint8))
        self._file.read(probe, memoryview(self._staging_memory(probe.capacity)))
        self._file.free(probe)

    def _write(self, data_N: Tensor) -> DiskSlot:
        staged = self._staging_memory(capacity := _slot_size(data_N.numel()))
        staged_N = torch.frombuffer(staged, dtype=torch.uint8, count=data_N.numel())
        staged_N.copy_(data_N, non_blocking=True)
        synchronize(data_N)
        slot = self._file.allocate("activations", capacity)
        self._file.write(slot, memoryview(staged))
        return slot

    def _read(self, written: "Future[Any]", into_N: Tensor) -> None:
        slot: DiskSlot = written.result()
        staged = self._staging_memory(slot.capacity)
        self._file.read(slot, memoryview(staged))
        read_N = torch.frombuffer(staged, dtype=torch.uint8, count=into_N.numel())
        into_N.copy_(read_N, non_blocking=True)
        synchronize(into_N)

    def _free(self, written: "Future[Any]") -> None:
        if not written.cancelled() and written.exception() is None:
            self._file.free(written.result())

    def _staging_memory(self, capacity: int) -> mmap.mmap:
        """Return this thread's aligned staging memory of at least ``capacity`` bytes."""
        memory: mmap.mmap | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < capacity:
            memory = self._own.memory = mmap.mmap(-1, capacity)
        return memory


def _slot_size(size: int) -> int:
    """Return the size class of a slot: one of eight between two powers of two."""
    step = max(BLOCK, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


class ActivationOffload:
    """Offloading of one rank's activations: the store of each kind of module."""

    def __init__(self, record: Offload, device: torch.device, rank: int = 0) -> None:
        self.record = record
        self.stores: dict[str, HostStore] = {}
        if record.host is not None:
            self.stores["host"] = HostStore(record.host, device)
        if record.disk is not None:
            self.stores["disk"] = FileStore(record.disk, device, rank)
        self.stash: PagedStash | None = None
        if record.pages is not None:
            self.stash = PagedStash(record.pages, device, record.in_flight)

    def without_pages(self) -> "ActivationOffload":
        """Return a copy without the paged stash."""
        unpaged = copy(self)
        unpaged.stash = None
        return unpaged

    def store_for(
        self, kind: str, layer: int, num_layers: int, computes_loss: bool
    ) -> HostStore | None:
        """Return the store of a kind's activations in a layer of a chunk; None to keep them."""
        for store in self.stores.values():
            if kind in store.record.modules and layer < offloaded_layers(
                store.record.share, num_layers, computes_loss
            ):
                return store
        return None


class OffloadedStorage:
    """An offloaded storage, released with its last reference."""

    def __init__(self, store: HostStore, written: "Future[Any]", data_N: Tensor) -> None:
        self._store = store
        self._written = written
        self._size = data_N.numel()
        self._device = data_N.device
        self._fetched: tuple[Tensor, Future[None]] | None = None

    def __del__(self) -> None:
        """Release the offloaded bytes."""
        self._store.free(self._written, self._size)

    def wait_offloaded(self) -> None:
        """Wait until the copy is complete and the device memory is free."""
        self._written.result()

    def prefetch(self) -> None:
        """Start to copy the storage back to the device."""
        if self._fetched is None:
            into_N = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._fetched = into_N, self._store.read(self._written, into_N)

    def wait_fetched(self) -> Tensor | None:
        """Wait for the bytes on the device and return them; None if they were not prefetched."""
        if self._fetched is None:
            return None
        into_N, done = self._fetched
        done.result()
        return into_N

    def load(self, layers: "OffloadedLayers", layer: int, dtype: torch.dtype) -> Tensor:
        """Return the storage on the device, and prefetch the layers that backward reads next."""
        self._store.stats.count_read(self._fetched is not None and self._fetched[1].done())
        layers.prefetch(layer)
        self.prefetch()
        into_N = self.wait_fetched()
        assert into_N is not None
        return into_N.view(dtype)


class OffloadedLayers:
    """Offloaded storages of a chunk by layer, for one micro-batch, to prefetch in backward.

    It holds weak references, so that storages that backward will not read are released.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._lowest = 1 << 62
        self._layers: defaultdict[int, list[ref[OffloadedStorage | PagedRows]]] = defaultdict(list)

    def add(self, layer: int, storage: OffloadedStorage | PagedRows) -> None:
        """Record an offloaded storage of a layer."""
        self._layers[layer].append(ref(storage))

    def wait_for_copies(self, layer: int) -> None:
        """Wait, before a layer's forward, until at most ``in_flight`` layers are being copied."""
        for storage in self._alive(layer - self._in_flight):
            storage.wait_offloaded()

    def prefetch(self, layer: int | None = None) -> None:
        """Start to fetch a layer and those that follow in backward.

        By default, fetch those that backward reads first.
        """
        first = max(self._layers, default=-1) if layer is None else layer
        last = max(first - self._in_flight + (layer is None), 0)
        if last < self._lowest:  # skip layers that were fetched already
            for number in range(min(first, self._lowest - 1), last - 1, -1):
                for storage in self._alive(number):
                    storage.prefetch()
            self._lowest = last

    def wait_all(self) -> None:
        """Wait for all copies in progress."""
        for layer in list(self._layers):
            for storage in self._alive(layer):
                storage.wait_offloaded()
                storage.wait_fetched()

    def _alive(self, layer: int) -> Iterator[OffloadedStorage | PagedRows]:
        storages = (reference() for reference in reversed(self._layers.get(layer, ())))
        return (storage for storage in storages if storage is not None)
