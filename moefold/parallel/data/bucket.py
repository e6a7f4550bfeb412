"""Flat buckets of parameters, sharded into one equal run for each rank.

A bucket is one flat tensor: parameters one after another at aligned offsets, cut into as many equal
runs as ranks shard it. A rank owns masters, summed gradients and, through the optimizer, the state
of its run, which has some parameters in full and at most two in part; any run of a row-major tensor
is a few boxes, which identify it in checkpoints. Unsharded, for as long as needed, are the weights
in the dtype that products read and the gradients of one pass or step. Collectives fill and read
both in place: parameters are views, and nothing is copied in or out.

Suffix L: elements of a run; other tensors cover the whole bucket.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from moefold.comm.collectives import Pending, all_gather_into, reduce_scatter_into, sum_
from moefold.comm.group import Group
from moefold.layers.placement import Box
from moefold.layers.precision import PrecisionPolicy
from moefold.mesh.partition import aligned


@dataclass(frozen=True)
class BucketSlot:
    """A parameter's offset and shape in its bucket."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's shard after tensor and expert parallelism."""
    start: int

    @property
    def stop(self) -> int:
        """Offset after the last element."""
        return self.start + math.prod(self.shape)

    def view_in(self, row: Tensor) -> Tensor:
        """Return the parameter as a view of a flat tensor of the unsharded bucket."""
        return row[self.start : self.stop].view(self.shape)

    def range_in(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the parameter's elements in a run; ``(a, a)`` if there are none."""
        first = min(max(start, self.start), self.stop)
        return first - self.start, max(first, min(stop, self.stop)) - self.start


def assign_slots(
    shapes: Iterable[tuple[str, tuple[int, ...]]], ranks: int
) -> tuple[list[BucketSlot], int]:
    """Return the parameters' slots, and the length of each rank's run."""
    slots = []
    end = 0
    for name, shape in shapes:
        slots.append(BucketSlot(name, shape, end))
        end = aligned(slots[-1].stop)
    return slots, aligned(-(-end // ranks))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements ``start`` to ``stop`` of a row-major tensor as boxes, in order.

    There are at most ``2 * dims - 1``, each contiguous in memory.
    """
    if start >= stop:
        return []
    rest = shape[1:]
    inner = math.prod(rest)
    full = tuple((0, size) for size in rest)
    a = -(-start // inner)
    b = stop // inner
    if a > b:  # inside one index
        return [((b, a), *box) for box in boxes(rest, start - b * inner, stop - b * inner)]
    covering: list[Box] = []
    if start < a * inner:
        covering += [((a - 1, a), *box) for box in boxes(rest, start - (a - 1) * inner, inner)]
    if a < b:
        covering.append(((a, b), *full))
    if b * inner < stop:
        covering += [((b, b + 1), *box) for box in boxes(rest, 0, stop - b * inner)]
    return covering


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def to_global(box: Box, shard_box: Box) -> Box:
    """Translate a box of the shard at ``shard_box`` to a box of the full tensor."""
    return tuple((a + start, b + start) for (a, b), (start, _) in zip(box, shard_box, strict=True))


class Bucket:
    """A flat bucket of parameters of one model unit, sharded over data ranks.

    Args:
        unit: the model unit of the parameters, such as ``layers.3``.
        parameters: by name; their values are copied, unless they are on ``meta``.
        shard_group: ranks that shard the bucket; one rank if only its state is offloaded.
        replica_group: ranks that have the same run and saw other tokens.
        dtype: dtype that products read.
        device: device of weights and gradients.
        keeps_weights: whether weights stay unsharded between uses (ZeRO below 3).
        master_device: device on which offloaded masters are updated, or None. Such masters can be
            freed (:mod:`moefold.parallel.data.offload`): gathers read a copy in ``dtype``.
    """

    storage_dtype: torch.dtype | None = None
    """Storage dtype of unsharded weights, where it is not ``dtype``."""
    elements_per_item = 1
    """Elements per item of ``storage_dtype``."""
    keeps_gradients = False
    """Whether unsharded gradients keep their memory across steps: recorded graphs add to them."""

    def __init__(
        self,
        unit: str,
        parameters: Mapping[str, Tensor],
        shard_group: Group,
        replica_group: Group,
        dtype: torch.dtype,
        device: torch.device,
        keeps_weights: bool,
        master_device: torch.device | None = None,
    ) -> None:
        first = next(iter(parameters.values()))
        self.unit = unit
        self.dtype = dtype
        self.shard_group = shard_group
        self.replica_group = replica_group
        self.is_unsharded = shard_group.size == 1
        self.keeps_weights = keeps_weights or self.is_unsharded
        self.offloaded = master_device is not None
        self.trained = first.requires_grad
        shapes = [(name, tuple(p.shape)) for name, p in parameters.items()]
        slots, self.length = assign_slots(shapes, shard_group.size)
        self.slots = {slot.name: slot for slot in slots}
        self.master_L = torch.zeros(self.length, dtype=first.dtype, device=master_device or device)
        self._compute_copy_L: Tensor | None = None
        items = self.length * shard_group.size // self.elements_per_item
        self.values = torch.empty(items, dtype=self.storage_dtype or dtype, device=device)
        self.gradients: Tensor | None = None
        self._freed_gradients: Tensor | None = None
        self.summed_L: Tensor | None = None
        self._users = 0
        self._gathering: tuple[Pending, _unsafe_preserve_version_counter] | None = None
        self._scattering: tuple[Tensor, Pending] | None = None
        # Views are made while the storage is allocated; they stay valid when it is resized.
        self.weights = {name: self._view(slot) for name, slot in self.slots.items()}
        self._resize(0)
        for name, slot in self.slots.items():
            if not parameters[name].is_meta:
                first, last = self.local_range(slot)
                self.local_view(slot, self.master_L).copy_(
                    parameters[name].detach().reshape(-1)[first:last]
                )
        self.handles = {name: handle_of(p, device) for name, p in parameters.items()}
        for name in self.handles if self.trained else ():
            self.handles[name].register_hook(partial(_refuse_gradient, name))

    @property
    def start(self) -> int:
        """Offset of this rank's run in the bucket."""
        return self.shard_group.index * self.length

    def local_range(self, slot: BucketSlot) -> tuple[int, int]:
        """Return the range of a parameter's elements in this rank's run."""
        return slot.range_in(self.start, self.start + self.length)

    def local_view(self, slot: BucketSlot, run_L: Tensor) -> Tensor:
        """Return this rank's elements of a parameter as a view of a run."""
        first, last = self.local_range(slot)
        offset = slot.start + first - self.start
        return run_L[offset : offset + last - first]

    # Weights

    def _view(self, slot: BucketSlot) -> Tensor:
        return slot.view_in(self.values)

    @property
    def unsharded_tensors(self) -> list[Tensor]:
        """Tensors that store the unsharded weights."""
        return [self.values]

    def register_weights(self, policy: PrecisionPolicy) -> None:
        """Register the weights with ``policy``, where layers look them up by their handles."""
        for name, handle in self.handles.items():
            policy.set_value(handle, self.weights[name])

    def refresh_weights(self) -> None:
        """Start to gather weights that stay unsharded, after any change of the masters."""
        if self.keeps_weights:
            self.all_gather()

    def unshard(self) -> None:
        """Add a user of the weights; the first one starts the gather of weights that are freed."""
        self._users += 1
        if self._users == 1 and not self.keeps_weights:
            self.all_gather()

    def reshard(self) -> None:
        """Remove a user of the weights; the last one frees those that do not stay unsharded."""
        self._users -= 1
        assert self._users >= 0, f"{self.unit} was released more often than acquired"
        if not self._users and not self.keeps_weights:
            self.wait_unshard()
            self._resize(0)

    def all_gather(self) -> None:
        """Start to gather the weights of all runs; :meth:`wait_unshard` waits for them."""
        self.wait_unshard()
        self._resize(self.values.numel())
        # Autograd saved these tensors in forward. The refill is no change: the values are equal.
        unchanged = _unsafe_preserve_version_counter(self.values)
        run = self._gather_input()
        if self.keeps_weights:
            self._compute_copy_L = None
        with self.shard_group.recorder.module("weights"):
            pending = all_gather_into(self.values, run, self.shard_group, asynchronous=True)
        self._gathering = pending, unchanged

    def _gather_input(self) -> Tensor:
        """Return this rank's run as the all-gather sends it."""
        run_L = self._compute_copy_L if self.offloaded else self.master_L.to(self.dtype)
        assert run_L is not None, f"{self.unit} is gathered while its masters are offloaded"
        return run_L

    def wait_unshard(self) -> None:
        """Wait until the weights may be read."""
        if self._gathering is not None:
            pending, unchanged = self._gathering
            self._gathering = None
            with unchanged:
                pending.wait()

    @property
    def has_compute_copy(self) -> bool:
        """Whether there is a copy of this rank's run in the dtype of products."""
        return self._compute_copy_L is not None

    def store_compute_copy(self, run_L: Tensor) -> None:
        """Copy this rank's run in the dtype of products, from masters on any device."""
        self._compute_copy_L = run_L.detach().to(self.values.device, self.dtype, copy=True)

    def free_derived(self) -> None:
        """Free all that follows from the masters, and gradients; :meth:`refresh_weights` makes the
        weights anew.
        """
        self.wait_unshard()
        self.begin_step()
        self._freed_gradients = None
        self._compute_copy_L = None
        self._resize(0)

    def _resize(self, elements: int) -> None:
        self.values.untyped_storage().resize_(elements * self.values.element_size())

    # Gradients

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """Allocated gradients: unsharded ones, this rank's sums, a reduce-scatter's output."""
        tensors = (self.gradients, self.summed_L, self._scattering and self._scattering[0])
        return [tensor for tensor in tensors if tensor is not None]

    def begin_step(self) -> None:
        """Drop the last step's sums, and the reduce-scatter of an aborted step."""
        self.wait_reduce()
        self.summed_L = None
        self.free_gradients()

    def open_gradients(self) -> None:
        """Allocate zeroed unsharded gradients, unless present, as the ``grad`` of the handles."""
        if self.gradients is not None or not self.trained:
            return
        freed = self._freed_gradients
        full = self._zeros(self.length * self.shard_group.size) if freed is None else freed.zero_()
        self.gradients = full
        for name, slot in self.slots.items():
            self.handles[name].grad = slot.view_in(self.gradients)

    def free_gradients(self) -> None:
        """Free the unsharded gradients."""
        if self.keeps_gradients and self.gradients is not None:
            self._freed_gradients = self.gradients
        self.gradients = None
        for handle in self.handles.values():
            handle.grad = None

    def reduce(self, in_place: bool = False) -> None:
        """Start to reduce-scatter the unsharded gradients; :meth:`wait_reduce` waits for it.

        ``in_place``: the output overwrites this rank's run of the unsharded gradients, whose memory
        then lasts as long as this rank's sums.
        """
        if self.gradients is None or self.is_unsharded:
            return
        self.wait_reduce()
        if in_place:
            part_L = self.gradients[self.start : self.start + self.length]
        else:
            part_L = self.gradients.new_empty(self.length)
        with self.shard_group.recorder.module("gradients"):
            pending = reduce_scatter_into(
                part_L, self.gradients, self.shard_group, asynchronous=True
            )
        self._scattering = part_L, pending

    def wait_reduce(self) -> None:
        """Wait for a reduce-scatter, add its output to this rank's sums, free its input."""
        if self._scattering is None:
            return
        part_L, pending = self._scattering
        self._scattering = None
        pending.wait()
        self.summed_L = part_L if self.summed_L is None else self.summed_L.add_(part_L)
        self.free_gradients()

    def finish(self) -> None:
        """Complete this rank's sums over all passes, and over both groups."""
        if not self.trained:
            return
        if self._scattering is None:
            self.reduce()
        self.wait_reduce()
        if self.is_unsharded:
            self.summed_L = self.gradients
        if self.summed_L is None:
            self.summed_L = self._zeros(self.length)
        if self.is_unsharded:
            return  # ShardedState sums these over replicas, with gradients outside of buckets
        with self.shard_group.recorder.module("gradients"):
            sum_(self.summed_L, self.replica_group)

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, dtype=self.master_L.dtype, device=self.values.device)


def handle_of(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Return a stand-in for a parameter whose values are stored elsewhere.

    It has the parameter's shape and dtype, reads as NaN, and can have an ordinary ``grad``.
    """
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nan.expand(parameter.shape), parameter.requires_grad)


def _refuse_gradient(name: str, gradient: Tensor | None) -> None:
    """Raise on a gradient from autograd: products use the sink, so the handle was read."""
    if gradient is None:
        return
    raise ValueError(
        f"{name} is read directly, but this layout keeps its values elsewhere, and it reads as "
        "NaN. Multiply by it with moefold.layers.linear.Linear, or read it by "
        "read_parameter(flow.operand(p, p.dtype), flow.sink) of moefold.kernels.gradients"
    )
