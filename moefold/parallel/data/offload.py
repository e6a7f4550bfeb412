"""Masters and moments that lie on the host or on disk between steps, and come for the update.

What leaves keeps its tensors: their memory goes, and comes back with the same values. The update
runs unit by unit, so that of all that lies elsewhere two units are there at most: one that is
updated, and one that comes while the one before goes. An optimizer that works on all parameters
together gets all at once.
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
    """Return the units whose state lies elsewhere, spread evenly over the model.

    What goes differs from its share of the elements, at every unit, by half of the largest unit at
    most.
    """
    found, gone, seen = list[str](), 0, 0
    for unit, count in elements.items():
        seen += count
        if gone + count / 2 <= share * seen:
            found.append(unit)
            gone += count
    return frozenset(found)


class StateOffload:
    """Where tensors of the state lie, on this rank.

    Attributes:
        home: where what lies elsewhere is updated.
        pool: the host's memory for what left; bytes are counted there.
        file: the file where things lie on disk.
        begin: begins a copy of what is there when it is begun.

    Raises:
        OffloadError: where the folder takes no file.
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
        """Take a tensor with memory of its own, and let its values go where they lie from now on.

        What the host updates in its own memory lies there as it is.
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
        """Give the places of tensors back, which are used no more."""
        for tensor in tensors:
            _, slot = self._slots.pop(_key(tensor))
            if slot is None:
                self.pool.adopt(-_bytes(tensor).numel())
            else:
                slot.free()

    def come(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to bring tensors; what is returned waits until they are there."""
        under_way = []
        for tensor, slot in self._moving(tensors):
            tensor.untyped_storage().resize_(tensor.nbytes)
            under_way.append(self.begin(partial(slot.get, _bytes(tensor))))
        return lambda: _wait(under_way)

    def leave(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to send tensors where they lie; what is returned waits, and takes their memory."""
        moving = list(self._moving(tensors))
        under_way = [self.begin(partial(slot.put, _bytes(tensor))) for tensor, slot in moving]

        def wait() -> None:
            _wait(under_way)
            for tensor, _ in moving:
                tensor.untyped_storage().resize_(0)

        return wait

    def lying(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, or of a part of it, where they lie, to look at and change.

        They are in the host's memory; from disk they are read, and go back by :meth:`settle`. A
        tensor that lies nowhere else is returned itself.
        """
        _, slot = self._slots.get(_key(tensor), (None, None))
        if slot is None:
            return tensor.detach()
        start = int(tensor.storage_offset())
        return slot.held().view(tensor.dtype)[start : start + tensor.numel()].view(tensor.shape)

    def settle(self) -> None:
        """Let what was looked at go back where it lies."""
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
    """Parameters that are updated together, and what of their state lies elsewhere."""

    optimizer: Optimizer
    buckets: Sequence[Bucket]
    """Whose masters lie elsewhere."""
    tensors: list[Tensor]
    """Those masters, and moments, each with memory of its own."""


class OffloadedOptimizer(Optimizer):
    """An optimizer whose state lies elsewhere: parts come, are updated and go, one after another.

    Gradients are of ``params``; on the host's step others are updated in their place.
    """

    def __init__(
        self, params: Mapping[str, Tensor], parts: Sequence[OffloadedPart], offload: StateOffload
    ) -> None:
        super().__init__(params)
        self._parts, self._offload = parts, offload
        self.group = max((part.optimizer.group for part in parts), default=0)

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter; masters and moments lie elsewhere when it returns."""
        self._gradients(scale)  # refuses before anything is changed
        gone: Callable[[], None] = _nothing
        there = self._come(0)
        for number, part in enumerate(self._parts):
            there()
            part.optimizer.step(scale, lr_factor)
            gone()
            there, gone = self._come(number + 1), self._leave(part)
        gone()

    def state(self) -> dict[str, Tensor]:
        """Return the state where it lies; write into it, then ``ShardedState.renew``."""
        return {
            name: self._offload.lying(tensor)
            for part in self._parts
            for name, tensor in part.optimizer.state().items()
        }

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rates of the parts."""
        return {k: v for part in self._parts for k, v in part.optimizer.lr(lr_factor).items()}

    def describe(self) -> dict[str, str]:
        """Return in words how the parts are updated, and where."""
        record, said = self._offload.record, dict[str, dict[str, None]]()
        for part in self._parts:
            for kind, words in part.optimizer.describe().items():
                said.setdefault(kind, {})[words] = None
        where = f"{record.share:.0%} of the state on the {record.at}, updated by the {record.step}"
        return {kind: f"{' or '.join(words)} at once; {where}" for kind, words in said.items()}

    def _come(self, number: int) -> Callable[[], None]:
        """Begin to bring what a part's update needs; what is returned waits for it."""
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
        """Begin to send a part away, and its weights to the device where the host has them."""
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
        # Their memory may go once both copies are made.
        gone = offload.leave(part.tensors)

        def wait() -> None:
            _wait(going)
            gone()

        return wait


def _key(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from all others that are there."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's whole memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _wait(under_way: Sequence[Future[Any]]) -> None:
    for copy in under_way:
        copy.result()


def _nothing() -> None:
    """Wait for nothing."""
