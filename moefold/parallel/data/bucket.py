"""Parameters whose copies live on the same ranks: each rank keeps a run of them.

A bucket is one row of elements: parameters one after the other, each at an aligned place, cut into
as many equal runs as ranks share it. A rank owns the masters, the summed gradients and, through the
optimizer, the state of its run, which covers some parameters whole and at most two in part; any run
of a row-major tensor is a few boxes, which is what checkpoints name. Whole are, for as long as they
are needed, the weights in the dtype that products take and the gradients of one pass or step. Both
are filled and read in place: parameters are views, and nothing is copied in or out.

Suffix L: elements of a run; others are of the whole bucket.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from moefold.comm.collectives import Pending, all_gather_into, reduce_scatter_into, sum_
from moefold.comm.group import Group
from moefold.layers.placement import Box
from moefold.layers.precision import PrecisionPolicy
from moefold.mesh.share import aligned


@dataclass(frozen=True)
class BucketSlot:
    """A parameter's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    """Of what this rank computes with."""
    start: int

    @property
    def stop(self) -> int:
        """The place after its last element."""
        return self.start + math.prod(self.shape)

    def of(self, row: Tensor) -> Tensor:
        """Return the parameter as a view of a whole bucket's row."""
        return row[self.start : self.stop].view(self.shape)

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of its own elements lie in a run of the bucket; ``(a, a)`` for none."""
        first = min(max(start, self.start), self.stop)
        return first - self.start, max(first, min(stop, self.stop)) - self.start


def lay_out(
    shapes: Iterable[tuple[str, tuple[int, ...]]], ranks: int
) -> tuple[list[BucketSlot], int]:
    """Return the parameters' places and the length of each rank's run."""
    slots, end = [], 0
    for name, shape in shapes:
        slots.append(BucketSlot(name, shape, end))
        end = aligned(slots[-1].stop)
    return slots, aligned(-(-end // ranks))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that the elements ``start`` to ``stop`` of a row-major tensor are, in order.

    At most ``2 * dims - 1`` of them; each is contiguous in memory.
    """
    if start >= stop:
        return []
    rest = shape[1:]
    inner = math.prod(rest)
    whole = tuple((0, size) for size in rest)
    a, b = -(-start // inner), stop // inner
    if a > b:  # inside one index
        return [((b, a), *box) for box in boxes(rest, start - b * inner, stop - b * inner)]
    found: list[Box] = []
    if start < a * inner:
        found += [((a - 1, a), *box) for box in boxes(rest, start - (a - 1) * inner, inner)]
    if a < b:
        found.append(((a, b), *whole))
    if b * inner < stop:
        found += [((b, b + 1), *box) for box in boxes(rest, 0, stop - b * inner)]
    return found


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def moved(box: Box, by: Box) -> Box:
    """Return a box of a tensor's piece as a box of the tensor, given where the piece is."""
    return tuple((a + at, b + at) for (a, b), (at, _) in zip(box, by, strict=True))


class Bucket:
    """Some parameters of one unit of the model.

    Args:
        unit: the part of the model that they are of, such as ``layers.3``.
        parameters: by name; their present values are taken, if they have any (``meta``).
        inside: the ranks that share the bucket, more than one.
        across: ranks with the same run, of which each saw other tokens.
        dtype: what products take.
        device: where all of it lives.
        keeps: whether weights stay whole between their uses.
        home: where masters are updated, if not there. They may lie elsewhere between steps
            (:mod:`moefold.parallel.data.offload`); then :meth:`narrow` says when they can be read.
    """

    stored: torch.dtype | None = None
    """Of whole weights, where that is not what products take."""
    per_item = 1
    """Elements that one of those holds."""
    gradients_stay = False
    """Whether whole gradients lie where they lay, as recorded graphs add to them."""

    def __init__(
        self,
        unit: str,
        parameters: Mapping[str, Tensor],
        inside: Group,
        across: Group,
        dtype: torch.dtype,
        device: torch.device,
        keeps: bool,
        home: torch.device | None = None,
    ) -> None:
        first = next(iter(parameters.values()))
        self.unit, self.inside, self.across, self.dtype = unit, inside, across, dtype
        self.alone = inside.size == 1
        self.keeps = keeps or self.alone
        self.offloaded = home is not None
        self.trained = first.requires_grad
        shapes = [(name, tuple(p.shape)) for name, p in parameters.items()]
        slots, self.length = lay_out(shapes, inside.size)
        self.slots = {slot.name: slot for slot in slots}
        self.master_L = torch.zeros(self.length, dtype=first.dtype, device=home or device)
        self._narrow_L: Tensor | None = None
        items = self.length * inside.size // self.per_item
        self.values = torch.empty(items, dtype=self.stored or dtype, device=device)
        self.gradients: Tensor | None = None
        self._freed_gradients: Tensor | None = None
        self.summed_L: Tensor | None = None
        self._users = 0
        self._gathering: tuple[Pending, _unsafe_preserve_version_counter] | None = None
        self._scattering: tuple[Tensor, Pending] | None = None
        # Views are made while there is memory behind them; they see it come and go.
        self.weights = {name: self._view(slot) for name, slot in self.slots.items()}
        self._resize(0)
        for name, slot in self.slots.items():
            if not parameters[name].is_meta:
                first, last = self.part(slot)
                self.own(slot, self.master_L).copy_(
                    parameters[name].detach().reshape(-1)[first:last]
                )
        self.handles = {name: handle_of(p, device) for name, p in parameters.items()}

    @property
    def start(self) -> int:
        """The place of this rank's first element."""
        return self.inside.index * self.length

    def part(self, slot: BucketSlot) -> tuple[int, int]:
        """Return which elements of a parameter are in this rank's run."""
        return slot.part(self.start, self.start + self.length)

    def own(self, slot: BucketSlot, run_L: Tensor) -> Tensor:
        """Return this rank's elements of a parameter as a view of a run."""
        first, last = self.part(slot)
        at = slot.start + first - self.start
        return run_L[at : at + last - first]

    # Weights

    def _view(self, slot: BucketSlot) -> Tensor:
        return slot.of(self.values)

    @property
    def whole(self) -> list[Tensor]:
        """What whole weights lie in."""
        return [self.values]

    def lend(self, recipe: PrecisionPolicy) -> None:
        """Let layers read the weights by their handles."""
        for name, handle in self.handles.items():
            recipe.give(handle, self.weights[name])

    def renew(self) -> None:
        """Bring weights that stay whole up to date with the masters, after any change of these."""
        if self.keeps:
            self.all_gather()

    def unshard(self) -> None:
        """Count a user, and start to gather the weights where they are not whole."""
        self._users += 1
        if self._users == 1 and not self.keeps:
            self.all_gather()

    def reshard(self) -> None:
        """Take a user away, and let the weights go where nobody is left."""
        self._users -= 1
        assert self._users >= 0, f"{self.unit} was let go more often than it was taken"
        if not self._users and not self.keeps:
            self.wait_unshard()
            self._resize(0)

    def all_gather(self) -> None:
        """Start to gather the weights of all runs; :meth:`wait_unshard` waits for them."""
        self.wait_unshard()
        self._resize(self.values.numel())
        # What a forward pass has kept for its backward is this memory, filled again alike.
        unchanged = _unsafe_preserve_version_counter(self.values)
        run = self._sent()
        if self.keeps:
            self._narrow_L = None
        with self.inside.recorder.module("weights"):
            pending = all_gather_into(self.values, run, self.inside, asynchronous=True)
        self._gathering = pending, unchanged

    def _sent(self) -> Tensor:
        """Return what travels of this rank's run."""
        run_L = self._narrow_L if self.offloaded else self.master_L.to(self.dtype)
        assert run_L is not None, f"{self.unit} is gathered while its masters lie elsewhere"
        return run_L

    def wait_unshard(self) -> None:
        """Return when the weights may be read."""
        if self._gathering is not None:
            pending, unchanged = self._gathering
            self._gathering = None
            with unchanged:
                pending.wait()

    @property
    def narrowed(self) -> bool:
        """Whether what products read of this rank's run is there, whole weights apart."""
        return self._narrow_L is not None

    def narrow(self, run_L: Tensor) -> None:
        """Take what products read of this rank's run, given its masters, wherever they are."""
        self._narrow_L = run_L.detach().to(self.values.device, self.dtype, copy=True)

    def _resize(self, elements: int) -> None:
        self.values.untyped_storage().resize_(elements * self.values.element_size())

    # Gradients

    @property
    def sums(self) -> list[Tensor]:
        """Gradients that are there: whole ones, this rank's sums, and a sum under way."""
        parts = (self.gradients, self.summed_L, self._scattering and self._scattering[0])
        return [one for one in parts if one is not None]

    def begin_step(self) -> None:
        """Forget the sums of the last step, and one that a step which was given up has begun."""
        self.wait_reduce()
        self.summed_L = None
        self.free_gradients()

    def open_gradients(self) -> None:
        """Let the parameters' gradients add up in place, from zero where none are there yet."""
        if self.gradients is not None or not self.trained:
            return
        there = self._freed_gradients
        whole = self._zeros(self.length * self.inside.size) if there is None else there.zero_()
        self.gradients = whole
        for name, slot in self.slots.items():
            self.handles[name].grad = slot.of(self.gradients)

    def free_gradients(self) -> None:
        """Let the whole gradients go."""
        if self.gradients_stay and self.gradients is not None:
            self._freed_gradients = self.gradients
        self.gradients = None
        for handle in self.handles.values():
            handle.grad = None

    def reduce(self) -> None:
        """Start to sum the whole gradients over the ranks; :meth:`wait_reduce` waits for it."""
        if self.gradients is None or self.alone:
            return
        self.wait_reduce()
        part_L = self.gradients.new_empty(self.length)
        with self.inside.recorder.module("gradients"):
            pending = reduce_scatter_into(part_L, self.gradients, self.inside, asynchronous=True)
        self._scattering = part_L, pending

    def wait_reduce(self) -> None:
        """Wait for a sum under way, add it to this rank's, and let the whole gradients go."""
        if self._scattering is None:
            return
        part_L, pending = self._scattering
        self._scattering = None
        pending.wait()
        self.summed_L = part_L if self.summed_L is None else self.summed_L.add_(part_L)
        self.free_gradients()

    def finish(self) -> None:
        """Complete this rank's sums: of all passes, and of the ranks that share the run."""
        if not self.trained:
            return
        if self._scattering is None:
            self.reduce()
        self.wait_reduce()
        if self.alone:
            self.summed_L = self.gradients
        if self.summed_L is None:
            self.summed_L = self._zeros(self.length)
        if self.alone:
            return  # summed over the other copies with what is in no bucket
        with self.inside.recorder.module("gradients"):
            sum_(self.summed_L, self.across)

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, dtype=self.master_L.dtype, device=self.values.device)


def handle_of(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Return what stands for a parameter whose values are elsewhere: its form, and NaN to read.

    Its gradient is an ordinary tensor.
    """
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
