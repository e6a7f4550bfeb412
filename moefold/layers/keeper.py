"""Activation policies by kind of module: saved on the device, recomputed, or offloaded.

Values never change. There are three policies:

* *checkpoint* saves a callable's inputs and reruns it in backward: blocks, attention core, FFNs.
* *discard* drops a callable's outputs from what their consumers save, and recomputes them from the
  inputs when a consumer's backward needs them: norms, MLA's up-projections, rows gathered over tp
  and experts' copies of rows, which are large and cheap; and the weights of experts' clones.
* *offload* moves saved tensors to the host or to disk (:mod:`moefold.layers.offload`).

All saved tensors pass through ``keep`` and ``take``, as autograd's saved-tensor hooks or by direct
call, so that no consumer knows of the policy. So do the inputs of recomputation: one that is itself
discarded is recomputed first, and an offloaded one takes no memory on the device.

The experts' pre-activation is dropped by their own function (``kernels/swiglu/ffn.py``).

A routing decision is never recomputed: the pass stores it (:class:`Decisions`) for any rerun.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from moefold.config.base import Record
from moefold.layers.config import Auto, Full, Kind, Selective, leaving
from moefold.layers.offload import Away, Departed, Offloading
from moefold.layers.stash import PagedRows

DISCARDED = frozenset({"norms", "mla_up", "gather", "permute", "clones"})
OWNED = frozenset({"norms", "attention", "ffn", "shared", "experts", "moe"})
"""Kinds that own what is first saved in their scope; other scopes leave it to those around."""
TAKING = frozenset({"attention", "experts"})
"""Kinds that also own their inputs, unless these were saved before."""
Value = TypeVar("Value")


class Decisions(dict[str, Any]):
    """The routing decisions of one micro-batch by layer name: made once, then replayed.

    ``read`` returns a decision of another run, or None; ``tell`` is called with each new one.
    """

    def __init__(
        self,
        given: Mapping[str, Any] = MappingProxyType({}),
        read: Callable[[str], Any] | None = None,
        tell: Callable[[str, Any], None] | None = None,
    ) -> None:
        super().__init__(given)
        self._read, self._tell = read, tell

    def begun(self) -> "Decisions":
        """Return a copy for a pass through one chunk, which adds its own decisions."""
        return Decisions(self, self._read, self._tell)

    def made(self, key: str) -> Any:
        """Return the decision of a layer; None if there is none yet."""
        if self._read is not None and key not in self:
            self[key] = self._read(key)
        return self.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Store the decision of a layer, and report it if it is new."""
        if self._tell is not None and key not in self:
            self._tell(key, value)
        super().__setitem__(key, value)


class _ByStorage(Generic[Value]):
    """Values by a tensor's storage, valid while that is alive, for all views of it."""

    def __init__(self) -> None:
        # A weak reference prevents reuse of the address by another storage.
        self._known: dict[int, tuple[StorageWeakRef, Value]] = {}

    def put(self, tensor: Tensor, value: Value) -> None:
        """Store the value of a tensor's storage."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage), value

    def of(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor's storage; None if there is none."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def forget(self) -> None:
        """Remove values whose storage was freed."""
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}

    def clear(self) -> None:
        """Remove all values."""
        self._known.clear()


class Keeper:
    """Applies activation policies to one micro-batch in one pipeline chunk.

    Args:
        record: recompute policy.
        offload: which kinds are offloaded, and where to.
        ends: whether the chunk computes the loss.
        clones: whether experts have clones on other ranks.
    """

    def __init__(
        self,
        record: Record | None = None,
        offload: Offloading | None = None,
        ends: bool = True,
        clones: bool = False,
    ) -> None:
        self.block = isinstance(record, Full)
        # An auto policy that is not resolved yet may choose any kind.
        chosen = get_args(Kind) if isinstance(record, Auto) else ()
        chosen = record.modules if isinstance(record, Selective) else chosen
        # Weights of clones are never saved, under any policy.
        self.kinds = frozenset[str]((*chosen, "clones") if clones else chosen)
        self._record, self._offload, self._ends = record, offload, ends
        self._made = _ByStorage[_DiscardedOutput]()
        """Discarded outputs that are still in memory."""
        self._kept = _ByStorage[Callable[[], Away | PagedRows | None]]()
        """Destinations of storages that were saved already."""
        self._owners = _ByStorage[str]()
        """Kinds of module that own outputs, whichever module saves them first."""
        self._scopes: list[_Scope] = []
        self._once: dict[tuple[int, object], tuple[Tensor, Any]] | None = None
        """Results of :meth:`once` in the outermost open scope; None if no scope is open."""
        self._layer: tuple[int, int] | None = None
        """(index, number of layers) of the running layer; None if nothing is offloaded."""
        self.again = False
        """Whether the running forward is a recomputation in backward, which offloads nothing."""
        in_flight = 0 if offload is None else offload.record.in_flight
        self.departed, self._spilled = Departed(in_flight), Departed(in_flight)

    def begun(self, ends: bool) -> "Keeper":
        """Return the keeper of a pass through one chunk; ``ends``: the chunk computes the loss."""
        return Keeper(self._record, self._offload, ends, "clones" in self.kinds)

    @property
    def bounded(self) -> bool:
        """Whether experts' rows are saved in pages, whose number is bounded."""
        return self._offload is not None and self._offload.record.pages is not None

    def run(self, kind: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return ``function(*tensors)``, run under the policy for ``kind``."""
        if not torch.is_grad_enabled():
            return function(*tensors)
        with self.scope(kind, *tensors):
            if self.wants(kind) and kind not in DISCARDED:
                again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
                return again(function, *tensors)
            result = function(*tensors)
        outputs = result if isinstance(result, tuple) else (result,)
        if kind == "norms":
            self.owns(kind, *outputs)
        self.discard(kind, outputs, function, *tensors)
        return result

    def wants(self, kind: str) -> bool:
        """Return whether a kind of module is to be recomputed in backward."""
        wanted = self.block if kind == "block" else kind in self.kinds
        return wanted and torch.is_grad_enabled()

    @contextmanager
    def scope(self, kind: str, *inputs: Tensor, ends: Tensor | None = None) -> Iterator[None]:
        """While open, tensors that are first saved belong to ``kind``, except its ``inputs``.

        ``ends``: row offsets of experts, the last of which is the number of valid rows.
        """
        outermost, owned = self._once is None, self._offload is not None and kind in OWNED
        if outermost:
            self._once = {}
        if owned:
            there = () if kind in TAKING else inputs
            there = frozenset(t.untyped_storage()._cdata for t in there)
            self._scopes.append(_Scope(kind, there, ends))
        try:
            yield
        finally:
            if owned:
                self._scopes.pop()
            if outermost:
                self._once = None

    def once(self, tensor: Tensor, key: object, make: Callable[[], Value]) -> Value:
        """Return ``make()`` for a tensor and key, computed once per outermost scope."""
        if self._once is None:
            return make()
        known = self._once.get((id(tensor), key))
        if known is None:
            known = self._once[id(tensor), key] = tensor, make()
        return known[1]

    def owns(self, kind: str, *outputs: Tensor) -> None:
        """Declare which kind of module owns tensors, whichever module saves them."""
        if self._offload is not None:
            for output in outputs:
                self._owners.put(output, kind)

    def stays(self, *tensors: Tensor) -> None:
        """Declare tensors, such as weights, that stay in memory anyway and are not offloaded."""
        if self._offload is not None:
            for tensor in tensors:
                self._kept.put(tensor, _nowhere)

    def discard(
        self, kind: str, outputs: Sequence[Tensor], function: Callable[..., Any], *inputs: Tensor
    ) -> None:
        """Drop ``outputs`` of ``function(*inputs)`` and recompute them, if the policy says so."""
        if kind not in DISCARDED or not self.wants(kind):
            return
        made = _Recomputation(function, tuple(self.keep(t.detach()) for t in inputs))
        self._made.forget()
        for index, output in enumerate(outputs):
            whole = output.nbytes == output.untyped_storage().nbytes()
            self._made.put(output, _DiscardedOutput(whole, _place(output), made, index))

    @contextmanager
    def keeping(self, at: int = 0, of: int = 1) -> Iterator[None]:
        """While open, apply the policies to layer ``at`` of the ``of`` layers of a chunk."""
        leaves = self._offload is not None and not self.again and torch.is_grad_enabled()
        if leaves:
            self._layer = at, of
            self.departed.enter(at)
        passes = self.kinds & DISCARDED or leaves
        with saved_tensors_hooks(self.keep, take) if passes else nullcontext():
            yield
        self._made.forget()
        self._kept.forget()
        self._owners.forget()
        self._layer = None

    def fetch(self) -> None:
        """Begin to prefetch the offloaded tensors that backward reads first."""
        self.departed.fetch()
        self._spilled.fetch()

    def end_forward(self) -> None:
        """Forget outputs that no further layer reads, such as that of the last norm."""
        for known in (self._made, self._kept, self._owners):
            known.clear()

    def keep(self, tensor: Tensor) -> Any:
        """Return what autograd saves for a tensor; :func:`take` turns it back into the tensor."""
        output = self._made.of(tensor)
        if output is not None and output.shows(place := _place(tensor)):
            output.made.waiting += 1
            first = place.first - output.place.first
            source = partial(output.made.take, output.index)
            return _Saved(source, tensor.size(), tensor.stride(), first)
        away = self._away(tensor)
        if isinstance(away, PagedRows):
            return _Saved(away.take, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if away is None or self._layer is None:
            return tensor
        source = partial(away.take, self.departed, self._layer[0], tensor.dtype)
        return _Saved(source, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _away(self, tensor: Tensor) -> Away | PagedRows | None:
        """Return where a tensor's storage is offloaded to, if it is; it is copied only once."""
        numbers = tensor.is_floating_point() or tensor.dtype == torch.uint8  # two codes each
        if self._layer is None or self._offload is None or not numbers:
            return None
        known, storage = self._kept.of(tensor), tensor.untyped_storage()
        if known is not None:
            return known()
        around = (one.kind for one in reversed(self._scopes) if storage._cdata not in one.there)
        owner = self._owners.of(tensor) or next(around, "block")  # residual rows are of no scope
        if (rows := self._paged(owner, tensor)) is not None:
            self._kept.put(tensor, ref(rows))
            return rows
        place = self._offload.place_of(owner, *self._layer, self._ends)
        if place is None or not storage.nbytes():
            self._kept.put(tensor, _nowhere)
            return None
        data_N = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        away = Away(place, place.send(data_N), data_N)
        self._kept.put(tensor, ref(away))
        self.departed.add(self._layer[0], away)
        return away

    def _paged(self, owner: str, tensor: Tensor) -> PagedRows | None:
        """Stash experts' rows in pages, if ``tensor`` is contiguous and fills its storage."""
        stash = None if self._offload is None else self._offload.stash
        ends_E = self._scopes[-1].ends if self._scopes else None
        if stash is None or ends_E is None or owner not in stash.record.modules:
            return None
        whole = tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
        if self._layer is None or not whole or tensor.dim() < 2:
            return None
        at, of = self._layer
        goes = at < leaving(stash.record.spill, of, self._ends)
        rows = stash.put(tensor, ends_E, (self._spilled.fetch, at) if goes else None)
        if goes and rows is not None:
            self._spilled.add(at, rows)
        return rows


def take(kept: Any) -> Tensor:
    """Return the tensor for what :meth:`Keeper.keep` returned."""
    return kept.take() if isinstance(kept, _Saved) else kept


def _nowhere() -> None:
    """Destination of a tensor that is not offloaded."""


class _Scope(NamedTuple):
    kind: str
    there: frozenset[int]
    """Storages of the scope's inputs, which it does not own."""
    ends: Tensor | None


@dataclass(frozen=True)
class _Saved:
    """What autograd saves in place of a discarded or offloaded tensor, or of a view of one."""

    whole: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset, in elements, from the start of the whole tensor."""

    def take(self) -> Tensor:
        whole = self.whole()
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)


class _Place(NamedTuple):
    """A tensor's place in its storage, and its version counter."""

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
        """Return output ``index``; the first call recomputes all outputs."""
        if self._again is None:
            with torch.no_grad():
                result = self._function(*map(take, self._inputs))
            self._again = result if isinstance(result, tuple) else (result,)
        output = self._again[index]
        self.waiting -= 1
        if self.waiting <= 0:
            self._again = None
        return output


class _DiscardedOutput(NamedTuple):
    """A discarded output, identified by its storage, since segments detach its tensor."""

    whole: bool
    """Whether the output fills its storage, so that any view of that is a view of the output."""
    place: _Place
    made: _Recomputation
    index: int

    def shows(self, place: _Place) -> bool:
        """Whether a tensor at ``place`` of the same storage is the unmodified output, or a part."""
        if place[2:] != self.place[2:]:
            return False
        return self.whole or place == self.place
