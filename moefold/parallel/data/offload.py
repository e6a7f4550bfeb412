"""Offloads masters and moments to host or disk between steps, and fetches them for the update.

Offloaded tensors remain; their memory is freed, and later reallocated with the same values. The
update runs unit by unit, so that at most two units are present: one that is updated, and one that
is fetched while the previous one is written back. An optimizer that works on all parameters
together needs all at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.offload.disk import DiskFile
from moefold.offload.slots import Copies, FileSlot, HostPool, HostSlot, OffloadSlot
from moefold.optim.base import Optimizer
from moefold.parallel.config import StatePlacement
from moefold.parallel.data.bucket import Bucket


def units_away(elements: Mapping[str, int], share: float) -> frozenset[str]:
    """Return the units whose state is offloaded, spread evenly over the model.

    ``elements`` counts those of each unit, in order. At every unit, the elements offloaded so far
    differ from ``share`` of those seen by at most half of the largest unit.
    """
    found, gone, seen = list[str](), 0, 0
    for unit, count in elements.items():
        seen += count
        if gone + count / 2 <= share * seen:
            found.append(unit)
            gone += count
    return frozenset(found)


class StateOffload:
    """Storage of this rank's offloaded state tensors, with asynchronous copies.

    Attributes:
        home: device on which offloaded state is updated.
        pool: host memory for offloaded tensors; counts its bytes.
        file: the file for ``at: disk``, or None.
        begin: starts a copy on another thread, ordered after the device's work so far.

    Raises:
        OffloadError: if no file can be created in the folder.
    """

    def __init__(self, record: StatePlacement, device: torch.device, rank: int) -> None:
        self.record, self.device = record, device
        self.by_host = record.step == "host"
        self.home = torch.device("cpu") if self.by_host else device
        self.pool, self.begin = HostPool(device), Copies(device).begin
        assert record.at == "host" or record.folder is not None
        self.file = DiskFile(record.folder, rank) if record.folder else None
        self._slots: dict[int, tuple[Tensor, OffloadSlot | None]] = {}

    def adopt(self, what: str, tensor: Tensor) -> None:
        """Register a tensor that owns its whole storage, and offload its values.

        A tensor that the host updates in its memory stays there, and is only counted.
        """
        values, slot = _bytes(tensor), None
        if self.file is not None:
            slot = FileSlot(self.file, self.pool, what, values.numel())
        elif not self.by_host:
            slot = HostSlot(self.pool, values.numel())
        else:
            self.pool.adopt(values.numel())
        self._slots[_key(tensor)] = tensor, slot
        self.leave([tensor])()

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Free the slots of tensors that are no longer used."""
        for tensor in tensors:
            _, slot = self._slots.pop(_key(tensor))
            if slot is None:
                self.pool.adopt(-_bytes(tensor).numel())
            else:
                slot.free()

    def come(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to fetch tensors; the function returned waits for them."""
        under_way = []
        for tensor, slot in self._moving(tensors):
            tensor.untyped_storage().resize_(tensor.nbytes)
            under_way.append(self.begin(partial(slot.get, _bytes(tensor))))
        return lambda: _wait(under_way)

    def leave(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to write tensors back; the function returned waits, then frees their memory."""
        moving = list(self._moving(tensors))
        under_way = [self.begin(partial(slot.put, _bytes(tensor))) for tensor, slot in moving]

        def wait() -> None:
            _wait(under_way)
            for tensor, _ in moving:
                tensor.untyped_storage().resize_(0)

        return wait

    def lying(self, tensor: Tensor) -> Tensor:
        """Return the stored values of a tensor, or of a view of one, for reading and writing.

        They are in host memory; those from disk are read, and written back by :meth:`settle`. A
        tensor that is not offloaded is returned itself.
        """
        _, slot = self._slots.get(_key(tensor), (None, None))
        if slot is None:
            return tensor.detach()
        start = int(tensor.storage_offset())
        return slot.held().view(tensor.dtype)[start : start + tensor.numel()].view(tensor.shape)

    def settle(self) -> None:
        """Write back the values that :meth:`lying` read from disk."""
        for _, slot in self._slots.values():
            if slot is not None:
                slot.settle()

    def _moving(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, OffloadSlot]]:
        for tensor in tensors:
            _, slot = self._slots[_key(tensor)]
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
    """An optimizer with offloaded state: fetches, updates and writes back one part after another.

    Gradients are those of ``params``; if the host updates, it updates masters of its own instead.
    """

    def __init__(
        self, params: Mapping[str, Tensor], parts: Sequence[OffloadedPart], offload: StateOffload
    ) -> None:
        super().__init__(params)
        self._parts, self._offload = parts, offload
        self.group = max((part.optimizer.group for part in parts), default=0)

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter; masters and moments are offloaded again when it returns."""
        self._gradients(scale)  # raises before anything is changed
        gone: Callable[[], None] = _nothing
        there = self._come(0)
        for number, part in enumerate(self._parts):
            there()
            part.optimizer.step(scale, lr_factor)
            gone()
            there, gone = self._come(number + 1), self._leave(part)
        gone()

    def state(self) -> dict[str, Tensor]:
        """Return the stored state; after writing into it call ``ShardedState.renew``."""
        return {
            name: self._offload.lying(tensor)
            for part in self._parts
            for name, tensor in part.optimizer.state().items()
        }

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rates of all parts."""
        return {k: v for part in self._parts for k, v in part.optimizer.lr(lr_factor).items()}

    def describe(self) -> dict[str, str]:
        """Return in words how and where the parts are updated."""
        record, said = self._offload.record, dict[str, dict[str, None]]()
        for part in self._parts:
            for kind, words in part.optimizer.describe().items():
                said.setdefault(kind, {})[words] = None
        where = f"{record.share:.0%} of the state on the {record.at}, updated by the {record.step}"
        return {kind: f"{' or '.join(words)} at a time; {where}" for kind, words in said.items()}

    def _come(self, number: int) -> Callable[[], None]:
        """Start to fetch what a part's update needs; the function returned waits for it."""
        if number == len(self._parts):
            return _nothing
        part, offload = self._parts[number], self._offload
        there = offload.come(part.tensors)
        if not (offload.by_host and part.buckets):
            return there
        passing, copies = dict[str, Tensor](), list[Future[Any]]()
        for name in part.optimizer.params:
            grad = self.params[name].grad
            assert grad is not None
            passing[name] = offload.pool.take(grad.nbytes).view(grad.dtype).view(grad.shape)
            copies.append(offload.begin(partial(passing[name].copy_, grad, non_blocking=True)))

        def wait() -> None:
            there()
            _wait(copies)
            for name, master in part.optimizer.params.items():
                master.grad = passing[name]

        return wait

    def _leave(self, part: OffloadedPart) -> Callable[[], None]:
        """Start to write a part back, and to copy weights to the device if the host updates."""
        offload = self._offload
        if not (offload.by_host and part.buckets):
            for bucket in part.buckets:
                bucket.narrow(bucket.master_L)
            return offload.leave(part.tensors)
        for master in part.optimizer.params.values():
            assert master.grad is not None
            offload.pool.adopt(-master.grad.nbytes)
            master.grad = None
        going = [offload.begin(partial(b.narrow, b.master_L)) for b in part.buckets]
        # The masters' memory may be freed once both copies are done.
        gone = offload.leave(part.tensors)

        def wait() -> None:
            _wait(going)
            gone()

        return wait


def _key(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _wait(under_way: Sequence[Future[Any]]) -> None:
    for copy in under_way:
        copy.result()


def _nothing() -> None:
    """Wait for nothing."""
