"""Recompute: what backward needs is computed again instead of kept. Values never change.

Two ways, chosen by the kind of module:

* *checkpoint* keeps a callable's inputs and runs it again: whole blocks, the attention core, FFNs.
* *discard* drops a callable's outputs from what its consumers keep, and makes them again from its
  inputs when a consumer's backward asks: norms, MLA's up-projections, rows gathered from tensor
  ranks and experts' copies of rows, which are large and cheap. It works through autograd's
  saved-tensor hooks, so no consumer knows of it. Inputs are kept like anything else: one that is
  itself discarded is made again first.

The experts' pre-activation is dropped by their own function (``kernels/swiglu/ffn.py``).

A routing decision is never recomputed: the pass stores it (:class:`Decisions`) and any second run
of the same pass finds it there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from moefold.config.base import Record
from moefold.layers.config import Auto, Full, Kind, Selective

DISCARDED = frozenset({"norms", "mla_up", "gather", "permute"})


class Decisions(dict[str, Any]):
    """The routing decisions of one micro-batch by layer name: recorded once, then replayed."""


class Recompute:
    """Applies a recompute record to one forward pass."""

    def __init__(self, record: Record | None = None) -> None:
        self.block = isinstance(record, Full)
        # Not settled, all that could be chosen.
        chosen = get_args(Kind) if isinstance(record, Auto) else ()
        chosen = record.modules if isinstance(record, Selective) else chosen
        self.kinds = frozenset[str](chosen)
        self._made: dict[int, _DiscardedOutput] = {}
        """Outputs whose memory the pass still holds, by storage."""

    def run(self, kind: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call ``function(*tensors)`` under the policy for ``kind``; the values are the same."""
        if not self.wants(kind):
            return function(*tensors)
        if kind in DISCARDED:
            result = function(*tensors)
            outputs = result if isinstance(result, tuple) else (result,)
            self.discard(kind, outputs, function, *tensors)
            return result
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)

    def wants(self, kind: str) -> bool:
        """Return whether what a kind of module makes is to be made again in backward."""
        wanted = self.block if kind == "block" else kind in self.kinds
        return wanted and torch.is_grad_enabled()

    def discard(
        self, kind: str, outputs: Sequence[Tensor], function: Callable[..., Any], *inputs: Tensor
    ) -> None:
        """Make what ``function(*inputs)`` has returned again, where the policy wants that."""
        if not self.wants(kind):
            return
        made = _Recomputation(function, tuple(self._keep(t.detach()) for t in inputs))
        self._forget()
        for index, output in enumerate(outputs):
            storage = output.untyped_storage()
            whole = output.nbytes == storage.nbytes()
            self._made[storage._cdata] = _DiscardedOutput(
                StorageWeakRef(storage), whole, _place(output), made, index
            )

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While open, tensors kept for backward go through this policy."""
        hooks = saved_tensors_hooks(self._keep, _take) if self.kinds & DISCARDED else nullcontext()
        with hooks:
            yield
        self._forget()

    def end_forward(self) -> None:
        """Let go of outputs that no layer reads any more, such as the last norm's."""
        self._made.clear()

    def _forget(self) -> None:
        """Let go of outputs that are gone, and with them of what they would be made from."""
        self._made = {key: one for key, one in self._made.items() if not one.storage.expired()}

    def _keep(self, tensor: Tensor) -> Any:
        output = self._made.get(tensor.untyped_storage()._cdata)
        if output is None or not output.shows(place := _place(tensor)):
            return tensor
        output.made.waiting += 1
        offset = place.first - output.place.first
        return _SavedOutput(output.made, output.index, tensor.size(), tensor.stride(), offset)


def _take(kept: Any) -> Tensor:
    return kept.take() if isinstance(kept, _SavedOutput) else kept


class _Place(NamedTuple):
    """Where in its storage a tensor lies, and how often that was changed in place."""

    first: int
    elements: int
    dtype: torch.dtype
    version: int


def _place(tensor: Tensor) -> _Place:
    return _Place(int(tensor.storage_offset()), tensor.numel(), tensor.dtype, tensor._version)


class _Recomputation:
    """Recomputes a discarded result on its first use, and frees it after the last."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._function, self._inputs = function, inputs
        self._again: tuple[Tensor, ...] | None = None
        self.waiting = 0

    def take(self, index: int) -> Tensor:
        """Return output ``index``, computed again for the first taker."""
        if self._again is None:
            with torch.no_grad():
                result = self._function(*map(_take, self._inputs))
            self._again = result if isinstance(result, tuple) else (result,)
        output = self._again[index]
        self.waiting -= 1
        if self.waiting <= 0:
            self._again = None
        return output


class _DiscardedOutput(NamedTuple):
    """A discarded output, known by its memory: its tensor ends where a segment of a block does."""

    storage: StorageWeakRef
    whole: bool
    """Whether its storage holds nothing else, so that any view of that is one of the output."""
    place: _Place
    made: _Recomputation
    index: int

    def shows(self, place: _Place) -> bool:
        """Whether a tensor at a place of the same storage is the output as it was made, or part."""
        if self.storage.expired() or place[2:] != self.place[2:]:
            return False
        return self.whole or place == self.place


@dataclass(frozen=True)
class _SavedOutput:
    """What autograd holds in place of a discarded output, or of a view of one."""

    made: _Recomputation
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements between the output's first and this one's."""

    def take(self) -> Tensor:
        output = self.made.take(self.index)
        first = int(output.storage_offset()) + self.offset
        return output.as_strided(self.size, self.stride, first)
