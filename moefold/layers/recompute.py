"""Recompute: what backward needs is computed again instead of kept. Values never change.

Two ways, chosen by the kind of module:

* *checkpoint* keeps a callable's inputs and runs it again: whole blocks, the attention core, FFNs.
* *discard* drops a callable's outputs from what its consumers keep, and makes them again from its
  inputs when a consumer's backward asks: norms and MLA's up-projections, whose outputs are large
  and cheap. It works through autograd's saved-tensor hooks, so no consumer knows of it.

A routing decision is never recomputed: the pass stores it (:class:`Decisions`) and any second run
of the same pass finds it there.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moefold.config.base import Record
from moefold.layers.config import Full, Selective

DISCARDED = frozenset({"norms", "mla_up"})


class Decisions(dict[str, Any]):
    """The routing decisions of one micro-batch by layer name: recorded once, then replayed."""


class Recompute:
    """Applies a recompute record to one forward pass."""

    def __init__(self, record: Record | None = None) -> None:
        self.block = isinstance(record, Full)
        self.kinds = (
            frozenset(record.modules) if isinstance(record, Selective) else frozenset[str]()
        )
        self._made: dict[tuple[int, int], _DiscardedOutput] = {}

    def run(self, kind: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call ``function(*tensors)`` under the policy for ``kind``; the values are the same."""
        wanted = self.block if kind == "block" else kind in self.kinds
        if not wanted or not torch.is_grad_enabled():
            return function(*tensors)
        if kind in DISCARDED:
            return self._discard(function, tensors)
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While open, tensors kept for backward go through this policy."""
        hooks = saved_tensors_hooks(self._keep, _take) if self.kinds & DISCARDED else nullcontext()
        with hooks:
            yield
        self._made.clear()

    def _discard(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
        result = function(*tensors)
        outputs = result if isinstance(result, tuple) else (result,)
        made = _Recomputation(function, tuple(t.detach() for t in tensors))
        for index, output in enumerate(outputs):
            self._made[_place(output)] = _DiscardedOutput(
                weakref.ref(output), output._version, made, index
            )
        return result

    def _keep(self, tensor: Tensor) -> Any:
        output = self._made.get(_place(tensor))
        if output is None or not output.is_seen_by(tensor):
            return tensor
        output.made.waiting += 1
        return _SavedOutput(output.made, output.index, tensor.size(), tensor.stride())


def _take(kept: Any) -> Tensor:
    return kept.take() if isinstance(kept, _SavedOutput) else kept


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


class _Recomputation:
    """Recomputes a discarded result on its first use, and frees it after the last."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
        self._function, self._inputs = function, inputs
        self._again: tuple[Tensor, ...] | None = None
        self.waiting = 0

    def take(self, index: int) -> Tensor:
        """Return output ``index``, computed again for the first taker."""
        if self._again is None:
            with torch.no_grad():
                result = self._function(*self._inputs)
            self._again = result if isinstance(result, tuple) else (result,)
        output = self._again[index]
        self.waiting -= 1
        if self.waiting <= 0:
            self._again = None
        return output


@dataclass(frozen=True)
class _DiscardedOutput:
    """A discarded output while the pass still holds it."""

    alive: weakref.ref[Tensor]
    version: int
    made: _Recomputation
    index: int

    def is_seen_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, found at the output's place, is the output as it was made.

        Memory of a dead output may have been given to another tensor, all tensors without elements
        share a place, and what was changed in place is not what would be made again.
        """
        output = self.alive()
        if output is None or not tensor.numel() or tensor.dtype != output.dtype:
            return False
        return tensor._version == self.version


@dataclass(frozen=True)
class _SavedOutput:
    """What autograd holds in place of a discarded output, or of a view of one."""

    made: _Recomputation
    index: int
    size: torch.Size
    stride: tuple[int, ...]

    def take(self) -> Tensor:
        output = self.made.take(self.index)
        return output.as_strided(self.size, self.stride, output.storage_offset())
