"""What a forward keeps for backward, by kind of module: here, made again, or elsewhere.

Values never change. Three ways:

* *checkpoint* keeps a callable's inputs and runs it again: whole blocks, the attention core, FFNs.
* *discard* drops a callable's outputs from what its consumers keep, and makes them again from its
  inputs when a consumer's backward asks: norms, MLA's up-projections, rows gathered from tensor
  ranks and experts' copies of rows, which are large and cheap; and the weights of experts' clones.
* *offload* sends what is kept to the host or to disk (:mod:`moefold.layers.offload`).

All that is kept passes ``keep`` and ``take``, as autograd's saved-tensor hooks or called by name:
no consumer knows of it. What is made again is made from inputs that pass there too: one that is
itself discarded is made again first, and one that is away pins nothing on the device.

The experts' pre-activation is dropped by their own function (``kernels/swiglu/ffn.py``).

A routing decision is never recomputed: the pass stores it (:class:`Decisions`) and any second run
of the same pass finds it there.
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
"""Kinds that what is first kept within belongs to; what is within others is of those around."""
TAKING = frozenset({"attention", "experts"})
"""Kinds that their inputs belong to, where nothing else kept them before."""
Value = TypeVar("Value")


class Decisions(dict[str, Any]):
    """The routing decisions of one micro-batch by layer name: made once, then replayed.

    ``read`` gives those that were made elsewhere; ``tell`` hears of each that is made here.
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
        """Return the decisions of a pass through one chunk: at first those that were given."""
        return Decisions(self, self._read, self._tell)

    def made(self, key: str) -> Any:
        """Return what a layer decided, None where it did not yet."""
        if self._read is not None and key not in self:
            self[key] = self._read(key)
        return self.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Keep what a layer decided."""
        if self._tell is not None and key not in self:
            self._tell(key, value)
        super().__setitem__(key, value)


class _ByStorage(Generic[Value]):
    """Values by the memory of a tensor, as long as that is there, whatever shows it."""

    def __init__(self) -> None:
        # A weak reference keeps the address from being given to another storage.
        self._known: dict[int, tuple[StorageWeakRef, Value]] = {}

    def put(self, tensor: Tensor, value: Value) -> None:
        """Note a value."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage), value

    def of(self, tensor: Tensor) -> Value | None:
        """Return the value; None where there is none."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def forget(self) -> None:
        """Let go of values whose memory is gone."""
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}

    def clear(self) -> None:
        """Let go of all."""
        self._known.clear()


class Keeper:
    """Applies policies to what one micro-batch keeps in one chunk.

    Args:
        record: what is made again.
        offload: what goes where.
        ends: whether the chunk ends in the loss.
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
        # Not settled, all that could be chosen.
        chosen = get_args(Kind) if isinstance(record, Auto) else ()
        chosen = record.modules if isinstance(record, Selective) else chosen
        # Weights of clones are never kept, whatever is.
        self.kinds = frozenset[str]((*chosen, "clones") if clones else chosen)
        self._record, self._offload, self._ends = record, offload, ends
        self._made = _ByStorage[_DiscardedOutput]()
        """Outputs whose memory the pass still holds."""
        self._kept = _ByStorage[Callable[[], Away | PagedRows | None]]()
        """What was kept already, and where it went."""
        self._owners = _ByStorage[str]()
        """Kinds of module that outputs belong to, whoever keeps them first."""
        self._scopes: list[_Scope] = []
        self._once: dict[tuple[int, object], tuple[Tensor, Any]] | None = None
        """What was made of tensors while the outermost scope is open; None where none is."""
        self._layer: tuple[int, int] | None = None
        """Number of the layer that runs forward, and of how many; None where nothing leaves."""
        self.again = False
        """Whether what runs forward runs again, in backward, and leaves nothing for later."""
        in_flight = 0 if offload is None else offload.record.in_flight
        self.departed, self._spilled = Departed(in_flight), Departed(in_flight)

    def begun(self, ends: bool) -> "Keeper":
        """Return the keeper of a pass through one chunk, which may end in the loss."""
        return Keeper(self._record, self._offload, ends, "clones" in self.kinds)

    @property
    def bounded(self) -> bool:
        """Whether there is memory for experts' rows of as many as a stash has pages for."""
        return self._offload is not None and self._offload.record.pages is not None

    def run(self, kind: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call ``function(*tensors)`` under the policy for ``kind``; the values are the same."""
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
        """Return whether what a kind of module makes is to be made again in backward."""
        wanted = self.block if kind == "block" else kind in self.kinds
        return wanted and torch.is_grad_enabled()

    @contextmanager
    def scope(self, kind: str, *inputs: Tensor, ends: Tensor | None = None) -> Iterator[None]:
        """While open, what is kept and was not there before belongs to a kind of module.

        Of its rows those count that are before the last of ``ends``; all where there is none.
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
        """Return what ``make`` makes of a tensor, once for all who ask while a scope is open."""
        if self._once is None:
            return make()
        known = self._once.get((id(tensor), key))
        if known is None:
            known = self._once[id(tensor), key] = tensor, make()
        return known[1]

    def owns(self, kind: str, *outputs: Tensor) -> None:
        """Say which kind of module tensors belong to, whoever keeps them."""
        if self._offload is not None:
            for output in outputs:
                self._owners.put(output, kind)

    def stays(self, *tensors: Tensor) -> None:
        """Say that others hold tensors anyway, such as weights."""
        if self._offload is not None:
            for tensor in tensors:
                self._kept.put(tensor, _nowhere)

    def discard(
        self, kind: str, outputs: Sequence[Tensor], function: Callable[..., Any], *inputs: Tensor
    ) -> None:
        """Make what ``function(*inputs)`` has returned again, where the policy wants that."""
        if kind not in DISCARDED or not self.wants(kind):
            return
        made = _Recomputation(function, tuple(self.keep(t.detach()) for t in inputs))
        self._made.forget()
        for index, output in enumerate(outputs):
            whole = output.nbytes == output.untyped_storage().nbytes()
            self._made.put(output, _DiscardedOutput(whole, _place(output), made, index))

    @contextmanager
    def keeping(self, at: int = 0, of: int = 1) -> Iterator[None]:
        """While open, what is kept of layer ``at`` of a chunk's ``of`` goes by these policies."""
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
        """Begin to bring back what backward takes first, if it has left already."""
        self.departed.fetch()
        self._spilled.fetch()

    def end_forward(self) -> None:
        """Let go of outputs that no layer reads any more, such as the last norm's."""
        for known in (self._made, self._kept, self._owners):
            known.clear()

    def keep(self, tensor: Tensor) -> Any:
        """Return what stands for a tensor until :func:`take` gives it back."""
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
        """Return where a tensor's memory goes, if it leaves; it goes once."""
        numbers = tensor.is_floating_point() or tensor.dtype == torch.uint8  # two codes each
        if self._layer is None or self._offload is None or not numbers:
            return None
        known, storage = self._kept.of(tensor), tensor.untyped_storage()
        if known is not None:
            return known()
        owner = self._owner(tensor)
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
        """Return what stands for rows that lie in pages: experts' own, one matrix in its memory."""
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

    def _owner(self, tensor: Tensor) -> str:
        """Return the kind of module that a tensor belongs to; residual rows are of the block."""
        owner, key = self._owners.of(tensor), tensor.untyped_storage()._cdata
        around = (one.kind for one in reversed(self._scopes) if key not in one.there)
        return owner or next(around, "block")


def take(kept: Any) -> Tensor:
    """Return the tensor that was kept."""
    return kept.take() if isinstance(kept, _Saved) else kept


def _nowhere() -> None:
    """Where a tensor went that stays."""


class _Scope(NamedTuple):
    kind: str
    there: frozenset[int]
    """Memory that was there before."""
    ends: Tensor | None


@dataclass(frozen=True)
class _Saved:
    """What autograd holds in place of a tensor that is not there, or of a view of one."""

    whole: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements between the first of the whole and this one's."""

    def take(self) -> Tensor:
        whole = self.whole()
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)


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
                result = self._function(*map(take, self._inputs))
            self._again = result if isinstance(result, tuple) else (result,)
        output = self._again[index]
        self.waiting -= 1
        if self.waiting <= 0:
            self._again = None
        return output


class _DiscardedOutput(NamedTuple):
    """A discarded output, known by its memory: its tensor ends where a segment of a block does."""

    whole: bool
    """Whether its storage holds nothing else, so that any view of that is one of the output."""
    place: _Place
    made: _Recomputation
    index: int

    def shows(self, place: _Place) -> bool:
        """Whether a tensor at a place of the same storage is the output as it was made, or part."""
        if place[2:] != self.place[2:]:
            return False
        return self.whole or place == self.place
