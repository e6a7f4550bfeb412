"""Activation policies by kind of module: save on the device, recompute, or offload.

Policies never change values. There are three:

* *checkpoint* saves a callable's inputs and reruns it in backward: blocks, attention core, FFNs.
* *discard* drops a callable's outputs from what their consumers save, and recomputes them from the
  inputs when a consumer's backward needs them: norms, MLA's up-projections, rows gathered over tp
  and experts' copies of rows, which are large and cheap; and the weights of experts' clones.
* *offload* moves saved tensors to the host or to disk (:mod:`moefold.layers.offload`).

All saved tensors pass through ``pack`` and ``unpack``, as autograd's saved-tensor hooks or by
direct call, so layers need not know the policy. So do the inputs of recomputation: one that is
itself discarded is recomputed first, and an offloaded one takes no memory on the device.

The experts' pre-activation is dropped by their own function (``kernels/swiglu/ffn.py``).

A routing decision is never recomputed: :class:`RoutingDecisions` stores it for any rerun.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from moefold.config.base import Record
from moefold.layers.config import Full, Recompute, offloaded_layers
from moefold.layers.offload import ActivationOffload, OffloadedLayers, OffloadedStorage
from moefold.layers.stash import PagedRows

DISCARDED_KINDS = frozenset({"norms", "mla_up", "gather", "permute", "clones"})
OWNING_KINDS = frozenset({"norms", "attention", "ffn", "shared", "experts", "moe"})
"""Kinds that own tensors first saved in their scope; others leave them to the enclosing scope."""
INPUT_OWNING_KINDS = frozenset({"attention", "experts"})
"""Kinds that also own their inputs, unless these were saved earlier."""
Value = TypeVar("Value")


class RoutingDecisions(dict[str, Any]):
    """The routing decisions of one micro-batch by layer name: made once, then replayed.

    ``read`` returns a decision of a recorded run, or None; ``on_new`` is called with each new one.
    """

    def __init__(
        self,
        initial: Mapping[str, Any] = MappingProxyType({}),
        read: Callable[[str], Any] | None = None,
        on_new: Callable[[str, Any], None] | None = None,
    ) -> None:
        super().__init__(initial)
        self._read = read
        self._on_new = on_new

    def for_chunk(self) -> "RoutingDecisions":
        """Return a copy for a pass through one chunk, which adds its own decisions."""
        return RoutingDecisions(self, self._read, self._on_new)

    def lookup(self, key: str) -> Any:
        """Return the decision of a layer; None if there is none yet."""
        if self._read is not None and key not in self:
            self[key] = self._read(key)
        return self.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Store the decision of a layer, and report it if it is new."""
        if self._on_new is not None and key not in self:
            self._on_new(key, value)
        super().__setitem__(key, value)


class _StorageMap(Generic[Value]):
    """A mapping from storages to values, for all views and while the storage is alive."""

    def __init__(self) -> None:
        # A weak reference prevents reuse of the address by another storage.
        self._values: dict[int, tuple[StorageWeakRef, Value]] = {}

    def set(self, tensor: Tensor, value: Value) -> None:
        """Store the value of a tensor's storage."""
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = StorageWeakRef(storage), value

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor's storage; None if there is none."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def prune(self) -> None:
        """Remove values whose storage was freed."""
        self._values = {key: entry for key, entry in self._values.items() if not entry[0].expired()}

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()


class SavedTensors:
    """Applies activation policies to one micro-batch in one pipeline chunk.

    Args:
        record: recompute policy.
        offload: which kinds are offloaded, and where to.
        computes_loss: whether the chunk computes the loss.
        clones: whether experts have clones on other ranks.
    """

    def __init__(
        self,
        record: Record | None = None,
        offload: ActivationOffload | None = None,
        computes_loss: bool = True,
        clones: bool = False,
    ) -> None:
        self.block = isinstance(record, Full)
        chosen = frozenset[str]()
        if isinstance(record, Recompute) and not self.block:
            chosen = record.recomputed
        # Weights of clones are never saved, under any policy.
        self.kinds = chosen | {"clones"} if clones else chosen
        self._record = record
        self._offload = offload
        self._computes_loss = computes_loss
        self._discarded = _StorageMap[_DiscardedOutput]()
        """Discarded outputs that are still in memory."""
        self._saved = _StorageMap[Callable[[], OffloadedStorage | PagedRows | None]]()
        """Where each storage that was already saved is offloaded to."""
        self._owners = _StorageMap[str]()
        """Kinds of module that own outputs, regardless of which module saves them first."""
        self._scopes: list[_Scope] = []
        self._once: dict[tuple[int, object], tuple[Tensor, Any]] | None = None
        """Results of :meth:`cached` in the outermost open scope; None if no scope is open."""
        self._layer: tuple[int, int] | None = None
        """(index, number of layers) of the running layer; None if nothing is offloaded."""
        self.recomputing = False
        """Whether the running forward is a recomputation in backward, which offloads nothing."""
        in_flight = 0 if offload is None else offload.record.in_flight
        self.offloaded = OffloadedLayers(in_flight)
        self._spilled = OffloadedLayers(in_flight)

    def for_chunk(self, computes_loss: bool) -> "SavedTensors":
        """Return the policy for a pass through one chunk."""
        return SavedTensors(self._record, self._offload, computes_loss, "clones" in self.kinds)

    @property
    def uses_pages(self) -> bool:
        """Whether experts' rows are saved in pages, whose number is bounded."""
        return self._offload is not None and self._offload.record.pages is not None

    def run(self, kind: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return ``function(*tensors)``, run under the policy for ``kind``."""
        if not torch.is_grad_enabled():
            return function(*tensors)
        with self.scope(kind, *tensors):
            if self.recomputes(kind) and kind not in DISCARDED_KINDS:
                recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
                return recompute(function, *tensors)
            result = function(*tensors)
        outputs = result if isinstance(result, tuple) else (result,)
        if kind == "norms":
            self.set_owner(kind, *outputs)
        self.discard_outputs(kind, outputs, function, *tensors)
        return result

    def recomputes(self, kind: str) -> bool:
        """Return whether a kind of module is recomputed in backward."""
        chosen = self.block if kind == "block" else kind in self.kinds
        return chosen and torch.is_grad_enabled()

    @contextmanager
    def scope(self, kind: str, *inputs: Tensor, row_ends: Tensor | None = None) -> Iterator[None]:
        """While open, tensors saved for the first time belong to ``kind``, except its ``inputs``.

        ``row_ends``: row offsets of experts, the last of which is the number of valid rows.
        """
        outermost = self._once is None
        owned = self._offload is not None and kind in OWNING_KINDS
        if outermost:
            self._once = {}
        if owned:
            excluded = () if kind in INPUT_OWNING_KINDS else inputs
            excluded = frozenset(t.untyped_storage()._cdata for t in excluded)
            self._scopes.append(_Scope(kind, excluded, row_ends))
        try:
            yield
        finally:
            if owned:
                self._scopes.pop()
            if outermost:
                self._once = None

    def cached(self, tensor: Tensor, key: object, make: Callable[[], Value]) -> Value:
        """Return ``make()`` for a tensor and key, computed once per outermost scope."""
        if self._once is None:
            return make()
        entry = self._once.get((id(tensor), key))
        if entry is None:
            entry = self._once[id(tensor), key] = tensor, make()
        return entry[1]

    def set_owner(self, kind: str, *outputs: Tensor) -> None:
        """Declare which kind of module owns tensors, regardless of which module saves them."""
        if self._offload is not None:
            for output in outputs:
                self._owners.set(output, kind)

    def keep_on_device(self, *tensors: Tensor) -> None:
        """Exclude tensors that stay in memory anyway, such as weights, from offloading."""
        if self._offload is not None:
            for tensor in tensors:
                self._saved.set(tensor, _not_offloaded)

    def discard_outputs(
        self, kind: str, outputs: Sequence[Tensor], function: Callable[..., Any], *inputs: Tensor
    ) -> None:
        """Discard ``outputs`` of ``function(*inputs)`` if the policy recomputes ``kind``."""
        if kind not in DISCARDED_KINDS or not self.recomputes(kind):
            return
        recomputation = _Recomputation(function, tuple(self.pack(t.detach()) for t in inputs))
        self._discarded.prune()
        for index, output in enumerate(outputs):
            fills = output.nbytes == output.untyped_storage().nbytes()
            discarded = _DiscardedOutput(fills, _region(output), recomputation, index)
            self._discarded.set(output, discarded)

    @contextmanager
    def layer_hooks(self, layer: int = 0, num_layers: int = 1) -> Iterator[None]:
        """While open, apply the policies to a layer of a chunk of ``num_layers`` layers.

        Of what follows a chunk's layers, the last norm and multi-token layers, nothing is
        offloaded: ``num_layers`` is 0.
        """
        offloads = self._offload is not None and not self.recomputing and torch.is_grad_enabled()
        if offloads:
            self._layer = layer, num_layers
            self.offloaded.wait_for_copies(layer)
        active = self.kinds & DISCARDED_KINDS or offloads
        with saved_tensors_hooks(self.pack, unpack) if active else nullcontext():
            yield
        self._discarded.prune()
        self._saved.prune()
        self._owners.prune()
        self._layer = None

    def prefetch(self) -> None:
        """Begin to prefetch the offloaded tensors that backward reads first."""
        self.offloaded.prefetch()
        self._spilled.prefetch()

    def end_forward(self) -> None:
        """Forget outputs that no further layer reads, such as that of the last norm."""
        for storages in (self._discarded, self._saved, self._owners):
            storages.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves for a tensor; :func:`unpack` restores the tensor."""
        output = self._discarded.get(tensor)
        if output is not None and output.matches(region := _region(tensor)):
            output.recomputation.pending += 1
            offset = region.start - output.region.start
            load = partial(output.recomputation.output, output.index)
            return _SavedView(load, tensor.size(), tensor.stride(), offset)
        stored = self._offload_storage(tensor)
        if stored is None or self._layer is None:
            return tensor
        if isinstance(stored, PagedRows):
            load = stored.load
        else:
            load = partial(stored.load, self.offloaded, self._layer[0], tensor.dtype)
        return _SavedView(load, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _offload_storage(self, tensor: Tensor) -> OffloadedStorage | PagedRows | None:
        """Offload a tensor's storage, once for all its views; None if it stays on the device."""
        movable = tensor.is_floating_point() or tensor.dtype == torch.uint8  # packed codes
        if self._layer is None or self._offload is None or not movable:
            return None
        saved = self._saved.get(tensor)
        storage = tensor.untyped_storage()
        if saved is not None:
            return saved()
        scopes = (
            scope.kind for scope in reversed(self._scopes) if storage._cdata not in scope.inputs
        )
        owner = self._owners.get(tensor) or next(scopes, "block")  # residual rows have no scope
        if (rows := self._stash_rows(owner, tensor)) is not None:
            self._saved.set(tensor, ref(rows))
            return rows
        store = self._offload.store_for(owner, *self._layer, self._computes_loss)
        if store is None or not storage.nbytes():
            self._saved.set(tensor, _not_offloaded)
            return None
        data_N = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        stored = OffloadedStorage(store, store.write(data_N), data_N)
        self._saved.set(tensor, ref(stored))
        self.offloaded.add(self._layer[0], stored)
        return stored

    def _stash_rows(self, owner: str, tensor: Tensor) -> PagedRows | None:
        """Stash experts' rows in pages, if ``tensor`` is contiguous and fills its storage."""
        stash = None if self._offload is None else self._offload.stash
        ends_E = self._scopes[-1].row_ends if self._scopes else None
        if stash is None or ends_E is None or owner not in stash.record.modules:
            return None
        fills = tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
        if self._layer is None or not fills or tensor.dim() < 2:
            return None
        layer, num_layers = self._layer
        spills = layer < offloaded_layers(stash.record.spill, num_layers, self._computes_loss)
        rows = stash.save(tensor, ends_E, (self._spilled.prefetch, layer) if spills else None)
        if spills and rows is not None:
            self._spilled.add(layer, rows)
        return rows


def unpack(packed: Any) -> Tensor:
    """Return the tensor that :meth:`SavedTensors.pack` was given."""
    return packed.unpack() if isinstance(packed, _SavedView) else packed


def _not_offloaded() -> None:
    """Destination of a storage that stays on the device."""


class _Scope(NamedTuple):
    kind: str
    inputs: frozenset[int]
    """Storages of the scope's inputs, which the scope does not own."""
    row_ends: Tensor | None


@dataclass(frozen=True)
class _SavedView:
    """What autograd saves in place of a discarded or offloaded tensor, or of a view of it."""

    load: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset, in elements, from the start of the loaded tensor."""

    def unpack(self) -> Tensor:
        loaded = self.load()
        return loaded.as_strided(self.size, self.stride, int(loaded.storage_offset()) + self.offset)


class _Region(NamedTuple):
    """The region of a tensor in its storage, and its version counter."""

    start: int
    elements: int
    dtype: torch.dtype
    version: int


def _region(tensor: Tensor) -> _Region:
    return _Region(int(tensor.storage_offset()), tensor.numel(), tensor.dtype, tensor._version)


class _Recomputation:
    """Recomputes a discarded result on its first use, and frees it after the last."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._function = function
        self._inputs = inputs
        self._outputs: tuple[Tensor, ...] | None = None
        self.pending = 0

    def output(self, index: int) -> Tensor:
        """Return output ``index``; the first call recomputes all outputs."""
        if self._outputs is None:
            with torch.no_grad():
                result = self._function(*map(unpack, self._inputs))
            self._outputs = result if isinstance(result, tuple) else (result,)
        output = self._outputs[index]
        self.pending -= 1
        if self.pending <= 0:
            self._outputs = None
        return output


class _DiscardedOutput(NamedTuple):
    """A discarded output, identified by its storage, because segments detach tensors."""

    fills_storage: bool
    """Whether the output fills its storage, so that any view of that is a view of the output."""
    region: _Region
    recomputation: _Recomputation
    index: int

    def matches(self, region: _Region) -> bool:
        """Whether a tensor of the same storage is the unmodified output or part of it."""
        if region[2:] != self.region[2:]:
            return False
        return self.fills_storage or region == self.region
