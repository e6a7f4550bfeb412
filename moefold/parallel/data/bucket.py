"""Parameters whose copies live on the same ranks: each rank keeps a run of them.

A bucket is one row of elements (see :mod:`.runs`) of which a rank owns the masters, the summed
gradients and, through the optimizer, the state of its run. Whole are, for as long as they are
needed, the weights in the dtype that products take and the gradients of one pass or step. Both are
filled and read in place: parameters are views, and nothing is copied in or out.

Suffix L: elements of a run; others are of the whole bucket.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from moefold.comm.collectives import Pending, all_gather_into, reduce_scatter_into, sum_
from moefold.comm.group import Group
from moefold.parallel.data.runs import Slot, lay_out


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
    """

    def __init__(
        self,
        unit: str,
        parameters: Mapping[str, Tensor],
        inside: Group,
        across: Group,
        dtype: torch.dtype,
        device: torch.device,
        keeps: bool,
    ) -> None:
        first = next(iter(parameters.values()))
        self.unit, self.inside, self.across, self.keeps = unit, inside, across, keeps
        self.trained = first.requires_grad
        shapes = [(name, tuple(p.shape)) for name, p in parameters.items()]
        self.slots, self.length = lay_out(shapes, inside.size)
        self._by_name = {slot.name: slot for slot in self.slots}
        self.master_L = torch.zeros(self.length, dtype=first.dtype, device=device)
        self.values = torch.empty(self.length * inside.size, dtype=dtype, device=device)
        self.gradients: Tensor | None = None
        self.summed_L: Tensor | None = None
        self._users = 0
        self._gathering: tuple[Pending, _unsafe_preserve_version_counter] | None = None
        self._scattering: tuple[Tensor, Pending] | None = None
        # Views are made while there is memory behind them; they see it come and go.
        self.weights = {slot.name: self._whole(slot, self.values) for slot in self.slots}
        self._resize(0)
        for slot in self.slots:
            if not parameters[slot.name].is_meta:
                self.own(slot, self.master_L).copy_(self._owned(slot, parameters[slot.name]))
        self.handles = {name: handle_of(p, device) for name, p in parameters.items()}

    @property
    def start(self) -> int:
        """The place of this rank's first element."""
        return self.inside.index * self.length

    def slot(self, name: str) -> Slot:
        """Return a parameter's place."""
        return self._by_name[name]

    def part(self, slot: Slot) -> tuple[int, int]:
        """Return which elements of a parameter are in this rank's run."""
        return slot.part(self.start, self.start + self.length)

    def own(self, slot: Slot, run_L: Tensor) -> Tensor:
        """Return this rank's elements of a parameter as a view of a run."""
        first, last = self.part(slot)
        at = slot.start + first - self.start
        return run_L[at : at + last - first]

    def _whole(self, slot: Slot, row: Tensor) -> Tensor:
        return row[slot.start : slot.stop].view(slot.shape)

    def _owned(self, slot: Slot, parameter: Tensor) -> Tensor:
        first, last = self.part(slot)
        return parameter.detach().reshape(-1)[first:last]

    # Weights

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
        run_L = self.master_L.to(self.values.dtype)
        with self.inside.recorder.module("weights"):
            pending = all_gather_into(self.values, run_L, self.inside, asynchronous=True)
        self._gathering = pending, unchanged

    def wait_unshard(self) -> None:
        """Return when the weights may be read."""
        if self._gathering is not None:
            pending, unchanged = self._gathering
            self._gathering = None
            with unchanged:
                pending.wait()

    def _resize(self, elements: int) -> None:
        self.values.untyped_storage().resize_(elements * self.values.element_size())

    # Gradients

    def begin_step(self) -> None:
        """Forget the sums of the last step."""
        self.summed_L = None
        self.free_gradients()

    def open_gradients(self) -> None:
        """Let the parameters' gradients add up in place, from zero where none are there yet."""
        if self.gradients is not None or not self.trained:
            return
        self.gradients = self.master_L.new_zeros(self.length * self.inside.size)
        for slot in self.slots:
            self.handles[slot.name].grad = self._whole(slot, self.gradients)

    def free_gradients(self) -> None:
        """Let the whole gradients go."""
        self.gradients = None
        for handle in self.handles.values():
            handle.grad = None

    def reduce(self) -> None:
        """Start to sum the whole gradients over the ranks; :meth:`wait_reduce` waits for it."""
        if self.gradients is None:
            return
        self.wait_reduce()
        part_L = torch.empty_like(self.master_L)
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
        if self.summed_L is None:
            self.summed_L = torch.zeros_like(self.master_L)
        with self.inside.recorder.module("gradients"):
            sum_(self.summed_L, self.across)


def handle_of(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Return what stands for a parameter whose values are elsewhere: its form, and NaN to read.

    Its gradient is an ordinary tensor.
    """
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
