"""Offloads masters and moments to host or disk between steps, and prefetches them for the update.

The tensor objects stay; their memory is freed, and later reallocated with the same values. The
update runs unit by unit, so that the device has at most two units: the one that is updated, and the
next, which is fetched while the previous one is written back. An optimizer that works on all
parameters together needs all at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.offload.disk import DiskFile
from moefold.offload.slots import (
    AsyncCopies,
    FileSlot,
    HostPool,
    HostSlot,
    OffloadSlot,
    storage_bytes,
    storage_id,
)
from moefold.optim.base import Optimizer
from moefold.parallel.config import StatePlacement
from moefold.parallel.data.bucket import Bucket


def units_to_offload(elements: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Return the units to offload, evenly spaced over the model.

    ``elements`` has the number in each unit, in order. At every unit, the elements offloaded so far
    differ from ``fraction`` of those counted by at most half of the largest unit.
    """
    offloaded_units = list[str]()
    offloaded = 0
    total = 0
    for unit, count in elements.items():
        total += count
        if offloaded + count / 2 <= fraction * total:
            offloaded_units.append(unit)
            offloaded += count
    return frozenset(offloaded_units)


class StateOffload:
    """Storage of this rank's offloaded state tensors, with asynchronous copies.

    Attributes:
        update_device: device on which offloaded state is updated.
        pool: host memory for offloaded tensors; counts its bytes.
        file: the file for ``at: disk``, or None.
        begin: starts a copy on another thread, after the device's work so far.

    Raises:
        OffloadError: if no file can be created in the folder.
    """

    def __init__(self, record: StatePlacement, device: torch.device, rank: int) -> None:
        self.record = record
        self.device = device
        self.updates_on_host = record.step == "host"
        self.update_device = torch.device("cpu") if self.updates_on_host else device
        self.pool = HostPool(device)
        self.begin = AsyncCopies(device).start
        assert record.at == "host" or record.folder is not None
        self.file = DiskFile(record.folder, rank) if record.folder else None
        self._slots: dict[int, tuple[Tensor, OffloadSlot | None]] = {}

    def register(self, description: str, tensor: Tensor) -> None:
        """Register a tensor that owns its storage, and offload its values.

        A tensor that the host updates in host memory stays there, and is only counted.
        """
        values = storage_bytes(tensor)
        slot = None
        if self.file is not None:
            slot = FileSlot(self.file, self.pool, description, values.numel())
        elif not self.updates_on_host:
            slot = HostSlot(self.pool, values.numel())
        else:
            self.pool.count(values.numel())
        self._slots[storage_id(tensor)] = tensor, slot
        self.write_back([tensor])()

    def unregister(self, tensors: Sequence[Tensor]) -> None:
        """Free the slots of tensors that are no longer used."""
        for tensor in tensors:
            _, slot = self._slots.pop(storage_id(tensor))
            if slot is None:
                self.pool.count(-storage_bytes(tensor).numel())
            else:
                slot.free()

    def prefetch(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to fetch tensors; return a function that waits for them."""
        copies = []
        for tensor, slot in self._slots_of(tensors):
            tensor.untyped_storage().resize_(tensor.nbytes)
            copies.append(self.begin(partial(slot.read, storage_bytes(tensor))))
        return lambda: _wait(copies)

    def write_back(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to write tensors back; return a function that waits, then frees their memory."""
        offloaded = list(self._slots_of(tensors))
        copies = [
            self.begin(partial(slot.write, storage_bytes(tensor))) for tensor, slot in offloaded
        ]

        def wait() -> None:
            _wait(copies)
            for tensor, _ in offloaded:
                tensor.untyped_storage().resize_(0)

        return wait

    def stored_values(self, tensor: Tensor) -> Tensor:
        """Return the stored values of a tensor, or of a view of one, for reading and writing.

        They are in host memory; those on disk are read, and written back by :meth:`flush`. For a
        tensor that is not offloaded, returns the tensor.
        """
        _, slot = self._slots.get(storage_id(tensor), (None, None))
        if slot is None:
            return tensor.detach()
        start = int(tensor.storage_offset())
        return (
            slot.host_values().view(tensor.dtype)[start : start + tensor.numel()].view(tensor.shape)
        )

    def flush(self) -> None:
        """Write back the values that :meth:`stored_values` read from disk."""
        for _, slot in self._slots.values():
            if slot is not None:
                slot.flush()

    def _slots_of(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, OffloadSlot]]:
        for tensor in tensors:
            _, slot = self._slots[storage_id(tensor)]
            if slot is not None:
                yield tensor, slot


@dataclass
class OffloadedPart:
    """Parameters that are updated together, and their offloaded state."""

    optimizer: Optimizer
    buckets: Sequence[Bucket]
    """Buckets with offloaded masters."""
    tensors: list[Tensor]
    """Offloaded masters and moments, each with its own storage."""


class OffloadedOptimizer(Optimizer):
    """An optimizer with offloaded state: fetches, updates and writes back part after part.

    Gradients are those of ``params``; if the host updates, it updates separate masters instead.
    """

    def __init__(
        self, params: Mapping[str, Tensor], parts: Sequence[OffloadedPart], offload: StateOffload
    ) -> None:
        super().__init__(params)
        self._parts = parts
        self._offload = offload
        self.group = max((part.optimizer.group for part in parts), default=0)

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter; masters and moments are offloaded again when it returns."""
        self._gradients(scale)  # raises before anything is changed
        wait_offloaded: Callable[[], None] = _no_op
        wait_fetched = self._prefetch(0)
        for number, part in enumerate(self._parts):
            wait_fetched()
            part.optimizer.step(scale, lr_factor)
            wait_offloaded()
            wait_fetched = self._prefetch(number + 1)
            wait_offloaded = self._offload_part(part)
        wait_offloaded()

    def state(self) -> dict[str, Tensor]:
        """Return the stored state; after writing into it call
        ``ShardedState.refresh_weights``."""
        return {
            name: self._offload.stored_values(tensor)
            for part in self._parts
            for name, tensor in part.optimizer.state().items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all parts; those that are offloaded have no memory."""
        for part in self._parts:
            yield from part.optimizer.tensors()

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rates of all parts."""
        return {k: v for part in self._parts for k, v in part.optimizer.lr(lr_factor).items()}

    def describe(self) -> dict[str, str]:
        """Describe how and where the parts are updated."""
        record = self._offload.record
        texts = dict[str, dict[str, None]]()
        for part in self._parts:
            for kind, text in part.optimizer.describe().items():
                texts.setdefault(kind, {})[text] = None
        where = f"{record.share:.0%} of the state on the {record.at}, updated by the {record.step}"
        return {kind: f"{' or '.join(each)} at a time; {where}" for kind, each in texts.items()}

    def _prefetch(self, number: int) -> Callable[[], None]:
        """Start to fetch what a part's update needs; return a function that waits for it."""
        if number == len(self._parts):
            return _no_op
        part = self._parts[number]
        offload = self._offload
        wait_state = offload.prefetch(part.tensors)
        if not (offload.updates_on_host and part.buckets):
            return wait_state
        host_grads = dict[str, Tensor]()
        copies = list[Future[Any]]()
        for name in part.optimizer.params:
            grad = self.params[name].grad
            assert grad is not None
            host_grads[name] = offload.pool.allocate(grad.nbytes).view(grad.dtype).view(grad.shape)
            copies.append(offload.begin(partial(host_grads[name].copy_, grad, non_blocking=True)))

        def wait() -> None:
            wait_state()
            _wait(copies)
            for name, master in part.optimizer.params.items():
                master.grad = host_grads[name]

        return wait

    def _offload_part(self, part: OffloadedPart) -> Callable[[], None]:
        """Start to write a part back, and to copy weights to the device if the host updates."""
        offload = self._offload
        if not (offload.updates_on_host and part.buckets):
            for bucket in part.buckets:
                bucket.store_compute_copy(bucket.master_L)
            return offload.write_back(part.tensors)
        for master in part.optimizer.params.values():
            assert master.grad is not None
            offload.pool.count(-master.grad.nbytes)
            master.grad = None
        copies = [offload.begin(partial(b.store_compute_copy, b.master_L)) for b in part.buckets]
        # The masters' memory may be freed once both copies are done.
        wait_state = offload.write_back(part.tensors)

        def wait() -> None:
            _wait(copies)
            wait_state()

        return wait


def _wait(copies: Sequence[Future[Any]]) -> None:
    for copy in copies:
        copy.result()


def _no_op() -> None:
    """Wait for nothing."""
