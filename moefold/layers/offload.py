"""Offloading of activations to host memory or disk between forward and backward.

A storage is copied once, for all its views, and prefetched before its layer's backward. Copies run
concurrently with compute: on threads, and on CUDA on a stream of their own. Device memory is freed
when the copy has ended.
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

from moefold.layers.config import Offload, OffloadToDisk, OffloadToHost, leaving
from moefold.layers.stash import PagedRows, PagedStash
from moefold.offload.disk import BLOCK, DiskFile, DiskSlot
from moefold.offload.slots import Copies, finish


class StoreFigures:
    """Statistics of a place on one rank: bytes, and how often prefetching was in time."""

    def __init__(self) -> None:
        self.held = self.peak = self.moved = 0
        """Bytes held now, at most, and written in total."""
        self.takes = self.present = 0
        """Number of takes, and of takes that found the data already fetched."""
        # Reentrant: storages are freed on any thread, even by an allocation within these methods.
        self._lock = threading.RLock()

    def add(self, size: int) -> None:
        """Count bytes that are written (positive) or released (negative)."""
        with self._lock:
            self.held += size
            self.moved += max(size, 0)
            self.peak = max(self.peak, self.held)

    def taken(self, there: bool) -> None:
        """Count a take."""
        with self._lock:
            self.takes += 1
            self.present += there


class HostStore:
    """Offloads to host memory, pinned for a GPU; base of every place.

    Each copy is a job on the place's threads; jobs run in the order of their requests.
    """

    threads = 1

    def __init__(self, record: OffloadToHost, device: torch.device) -> None:
        self.record, self._device = record, device
        self.figures = StoreFigures()
        self._copies = Copies(device, self.threads)

    def send(self, data_N: Tensor) -> "Future[Any]":
        """Begin to copy the bytes of a storage; the future returns where they are stored."""
        self.figures.add(data_N.numel())
        held = [data_N]  # popped, as a job is released only a moment after its future is done
        return self._copies.begin(lambda: self._send(held.pop()))

    def bring(self, sent: "Future[Any]", into_N: Tensor) -> "Future[None]":
        """Begin to copy bytes back, after they have been sent."""
        held = [into_N]
        return self._copies.begin(lambda: self._bring(sent, held.pop()))

    def drop(self, sent: "Future[Any]", size: int) -> None:
        """Release bytes that will not be read any more."""
        self.figures.add(-size)
        sent.add_done_callback(self._free)

    def _send(self, data_N: Tensor) -> Any:
        kept_N = torch.empty(data_N.numel(), dtype=torch.uint8, pin_memory=data_N.is_cuda)
        kept_N.copy_(data_N, non_blocking=True)
        finish(data_N)
        return kept_N

    def _bring(self, sent: "Future[Any]", into_N: Tensor) -> None:
        into_N.copy_(sent.result(), non_blocking=True)
        finish(into_N)

    def _free(self, sent: "Future[Any]") -> None:
        """Free the stored bytes; here the memory is freed with the future."""


class FileStore(HostStore):
    """Offloads to a file per rank, in slots of few sizes, at most an eighth larger than needed."""

    threads = 2

    def __init__(self, record: OffloadToDisk, device: torch.device, rank: int) -> None:
        super().__init__(record, device)
        self._file = DiskFile(record.folder, rank, "the activations' file")
        self._own = threading.local()
        tried = self._send(torch.ones(BLOCK, dtype=torch.uint8))
        self._file.read(tried, memoryview(self._staged(tried.room)))
        self._file.free(tried)

    def _send(self, data_N: Tensor) -> DiskSlot:
        staged = self._staged(room := _room(data_N.numel()))
        held_N = torch.frombuffer(staged, dtype=torch.uint8, count=data_N.numel())
        held_N.copy_(data_N, non_blocking=True)
        finish(data_N)
        slot = self._file.slot("activations", room)
        self._file.write(slot, memoryview(staged))
        return slot

    def _bring(self, sent: "Future[Any]", into_N: Tensor) -> None:
        slot: DiskSlot = sent.result()
        staged = self._staged(slot.room)
        self._file.read(slot, memoryview(staged))
        read_N = torch.frombuffer(staged, dtype=torch.uint8, count=into_N.numel())
        into_N.copy_(read_N, non_blocking=True)
        finish(into_N)

    def _free(self, sent: "Future[Any]") -> None:
        if not sent.cancelled() and sent.exception() is None:
            self._file.free(sent.result())

    def _staged(self, room: int) -> mmap.mmap:
        """Return this thread's aligned staging memory of at least ``room`` bytes."""
        held: mmap.mmap | None = getattr(self._own, "memory", None)
        if held is None or len(held) < room:
            held = self._own.memory = mmap.mmap(-1, room)
        return held


def _room(size: int) -> int:
    """Return the size of a slot: one of eight sizes between two powers of two."""
    step = max(BLOCK, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


class Offloading:
    """Offloading of one rank: the place of activations by kind of module."""

    def __init__(self, record: Offload, device: torch.device, rank: int = 0) -> None:
        self.record = record
        self.places: dict[str, HostStore] = {}
        if record.host is not None:
            self.places["host"] = HostStore(record.host, device)
        if record.disk is not None:
            self.places["disk"] = FileStore(record.disk, device, rank)
        self.stash: PagedStash | None = None
        if record.pages is not None:
            self.stash = PagedStash(record.pages, device, record.in_flight)

    def without_pages(self) -> "Offloading":
        """Return a copy without the paged stash."""
        places = copy(self)
        places.stash = None
        return places

    def place_of(self, kind: str, at: int, of: int, ends: bool) -> HostStore | None:
        """Return the place of a kind's activations in layer ``at`` of a chunk of ``of`` layers.

        ``ends``: whether the chunk computes the loss.
        """
        for place in self.places.values():
            if kind in place.record.modules and at < leaving(place.record.share, of, ends):
                return place
        return None


class Away:
    """An offloaded storage, released when nothing refers to it any more."""

    def __init__(self, place: HostStore, sent: "Future[Any]", data_N: Tensor) -> None:
        self._place, self._sent = place, sent
        self._size, self._device = data_N.numel(), data_N.device
        self._back: tuple[Tensor, Future[None]] | None = None

    def __del__(self) -> None:
        """Release the offloaded bytes."""
        self._place.drop(self._sent, self._size)

    def left(self) -> None:
        """Wait until the copy has ended and the device memory is free."""
        self._sent.result()

    def fetch(self) -> None:
        """Begin to copy the storage back to the device."""
        if self._back is None:
            into_N = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._back = into_N, self._place.bring(self._sent, into_N)

    def arrived(self) -> Tensor | None:
        """Wait for the bytes and return them on the device; None if they were not fetched."""
        if self._back is None:
            return None
        into_N, done = self._back
        done.result()
        return into_N

    def take(self, departed: "Departed", layer: int, dtype: torch.dtype) -> Tensor:
        """Return the storage on the device, and prefetch the layers that are read next."""
        self._place.figures.taken(self._back is not None and self._back[1].done())
        departed.fetch(layer)
        self.fetch()
        into_N = self.arrived()
        assert into_N is not None
        return into_N.view(dtype)


class Departed:
    """Offloaded storages of a chunk by layer, for one micro-batch, to prefetch in backward.

    It holds weak references, so that storages which will not be read are released.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight, self._lowest = in_flight, 1 << 62
        self._layers: defaultdict[int, list[ref[Away | PagedRows]]] = defaultdict(list)

    def add(self, layer: int, away: Away | PagedRows) -> None:
        """Record an offloaded storage of a layer."""
        self._layers[layer].append(ref(away))

    def enter(self, layer: int) -> None:
        """Wait, before a layer's forward, until at most ``in_flight`` layers are being copied."""
        for away in self._of(layer - self._in_flight):
            away.left()

    def fetch(self, layer: int | None = None) -> None:
        """Begin to fetch a layer that is read now, and those that follow in backward.

        By default, fetch those that backward reads first.
        """
        first = max(self._layers, default=-1) if layer is None else layer
        last = max(first - self._in_flight + (layer is None), 0)
        if last < self._lowest:  # skip layers that were fetched already
            for number in range(min(first, self._lowest - 1), last - 1, -1):
                for away in self._of(number):
                    away.fetch()
            self._lowest = last

    def settle(self) -> None:
        """Wait for all copies in progress."""
        for layer in list(self._layers):
            for away in self._of(layer):
                away.left()
                away.arrived()

    def _of(self, layer: int) -> Iterator[Away | PagedRows]:
        found = (one() for one in reversed(self._layers.get(layer, ())))
        return (away for away in found if away is not None)
