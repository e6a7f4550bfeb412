"""Launches and bytes of a step on a device that is not here, by part of the model.

Each aten call that is no view and does not merely take memory is one launch. It reads every operand
once and writes every result once: an expanded operand is read as it is stored, a look-up reads as
many rows as it returns, a scatter touches as many as it is given, and what is only overwritten is
not read. A custom operation counts the same, so that a chain of calls that becomes one kernel
lowers both numbers. Attention is one launch each way, and a collective is one.

The least bytes of a part are those of one kernel that did all of it: what it reads that others
wrote, and what it writes that others read or that stays.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch
import torch.nn.functional as F
from no_values import waiting_function
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.kernels.attention import sdpa

PARTS = (
    ("norm", ("kernels/norm/", "layers/norm.py")),
    ("rope", ("kernels/rope/", "layers/rope.py")),
    ("head and loss", ("kernels/cross_entropy/", "layers/loss.py")),
    ("swiglu", ("kernels/swiglu/activation.py",)),
    ("expert products", ("kernels/grouped/", "moe/experts.py")),
    ("permute", ("kernels/permute/",)),
    ("router", ("moe/router.py", "moe/topk.py", "moe/scoring.py")),
    ("balance", ("moe/balance.py",)),
    ("dense products", ("kernels/linear/", "layers/ffn.py")),
    ("dispatch", ("moe/dispatch/",)),
    ("embedding", ("kernels/lookup/", "layers/linear.py")),
    ("attention", ("kernels/attention/", "layers/attention.py", "layers/context/")),
    ("residual", ("model/block.py", "moe/layer.py")),
    ("optimizer", ("optim/",)),
)
"""Files of each part of the model. A call belongs to the first part that any of its callers is in;
calls of a backward pass belong where the forward call was."""
SHARED = {"layers/rope.py"}
"""Files whose calls serve all layers, whichever makes them first."""
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "resize_",
}  # fmt: skip
OVERWRITES = {"copy_", "fill_", "zero_"}
COPIES = {"_to_copy", "copy_"}
LOOK_UPS = {"index_select", "gather", "embedding", "index"}
SCATTERS = {"index_add_", "index_put_", "scatter_", "scatter_add_", "lookup_gradient"}
CREATES = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}

Region = tuple[int, int, tuple[int, ...]]
"""A storage's number, and where in it a tensor lies."""


class Place(NamedTuple):
    """Where in the step a call belongs."""

    micro: int | None
    """The micro-batch; None between them."""
    layer: int | None
    part: str
    backward: bool


class Call(NamedTuple):
    """One launch."""

    place: Place
    name: str
    reads: dict[Region, int]
    """Bytes."""
    writes: dict[Region, int]


class Launches(TorchDispatchMode):
    """Notes every launch while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.micro: int | None = None
        """The micro-batch that is running."""
        self.waits = Counter[str]()
        """Copies from host memory that the host waits for, by the function that makes them."""
        self.label: Callable[[], str] = lambda: ""
        """Names the layer that is running, as ``layers.N`` somewhere in it."""
        self._places: dict[int, Place] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._kept: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._place()
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in COPIES and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            sides = {value.device.type for value in _tensors((args, result))}
            if len(sides) > 1:
                self.waits[waiting_function()] += 1
        if not func.is_view and name not in FREE:
            changed = {
                id(value)
                for value, said in zip(args, func._schema.arguments, strict=False)
                for value in tree_leaves(value)
                if said.alias_info is not None and said.alias_info.is_write
            }
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            self._note(place, name, _tensors((args, read)), _tensors(result), changed)
        return result

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Say of tensors that they outlive the step: what is written there is a result."""
        self._kept.update(self._number(x) for x in tensors if x is not None)

    def note(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Count an operation that no aten call stands for."""
        place = self._place()
        place = place._replace(part="exchange") if name != "attention" else place
        self._note(place, name, list(reads), list(writes), set())

    def _note(
        self, place: Place, name: str, given: list[Tensor], results: list[Tensor], changed: set[int]
    ) -> None:
        reads, writes = dict[Region, int](), dict[Region, int]()
        for at, value in enumerate(given):
            if name in CREATES or value.device.type == "cpu":
                continue
            looked_up = name in LOOK_UPS and at == 0
            size = sum(map(_size, results)) if looked_up else _size(value)
            if name in SCATTERS and id(value) in changed:
                size = min(size, max(_size(other) for other in given if other is not value))
            if id(value) in changed:
                writes[self._region(value)] = size
            if id(value) not in changed or name not in OVERWRITES:
                reads[self._region(value)] = min(size, _size(value))
        for value in results:
            if value.device.type != "cpu":
                writes.setdefault(self._region(value), _size(value))
        if any(reads.values()) or any(writes.values()):
            self.calls.append(Call(place, name, reads, writes))

    def _place(self) -> Place:
        """Return where the present call belongs; a forward one names its node's place too."""
        node = torch._C._current_autograd_node()
        if node is not None:
            place, here = self._places.get(node._sequence_nr()), self._read()
            parts = [name for name, _ in PARTS if name in (here.part, place and place.part)]
            layer = here.layer if place is None else place.layer
            return Place(self.micro, layer, parts[0] if parts else "step", True)
        place = self._read()
        self._places.setdefault(_get_sequence_nr() - 1, place)
        return place

    def _read(self) -> Place:
        """Read a place off the calling functions."""
        frame, files = sys._getframe(3), list[str]()
        while frame is not None:
            if "/moefold/" in frame.f_code.co_filename:
                files.append(frame.f_code.co_filename.rpartition("/moefold/")[2])
            frame = frame.f_back
        found = [part for part, names in PARTS for file in files if file.startswith(names)]
        layer = self.label().partition("layers.")[2].partition(".")[0]
        number = int(layer) if layer and not SHARED.intersection(files) else None
        return Place(self.micro, number, found[0] if found else "step", False)

    def _number(self, x: Tensor) -> int:
        """Return a storage's number; holding it keeps its address from being given again."""
        storage = x.untyped_storage()
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def _region(self, x: Tensor) -> Region:
        return self._number(x), int(x.storage_offset()), tuple(x.shape)

    def least(self) -> dict[Place, int]:
        """Return each place's least bytes, summed over its passes in the step."""
        reads: dict[Place, dict[Region, int]] = defaultdict(dict)
        writes: dict[Place, dict[Region, int]] = defaultdict(dict)
        read_by, writers = defaultdict[int, set[Place]](set), defaultdict[int, set[Place]](set)
        for call in self.calls:
            reads[call.place] |= call.reads
            writes[call.place] |= call.writes
            for storage, *_ in call.reads:
                read_by[storage].add(call.place)
            for storage, *_ in call.writes:
                writers[storage].add(call.place)
        found = dict[Place, int]()
        for place in {*reads, *writes}:
            outside = {r: n for r, n in reads[place].items() if writers[r[0]] != {place}}
            outside |= {r: n for r, n in reads[place].items() if r[0] in self._kept}
            results = {
                r: n
                for r, n in writes[place].items()
                if r[0] in self._kept or read_by[r[0]] - {place}
            }
            found[place] = self._once(outside) + self._once(results)
        return found

    def _once(self, regions: dict[Region, int]) -> int:
        """Return bytes of regions, of which one storage's are at most its own."""
        by_storage: dict[int, int] = defaultdict(int)
        for (storage, *_), size in regions.items():
            by_storage[storage] += size
        whole = {number: storage.nbytes() for number, storage in self._storages.values()}
        return sum(min(size, whole[number]) for number, size in by_storage.items())


@contextmanager
def attention_as_one(launches: Launches) -> Iterator[None]:
    """While open, ``scaled_dot_product_attention`` is one launch each way, as fused kernels are.

    It takes values narrower than keys, as cuDNN's do on a Hopper.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q[..., : v.shape[-1]])
            ctx.save_for_backward(q, k, v, out)
            launches.note("attention", [q, k, v], [out])
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            gradients = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
            launches.note("attention", [*ctx.saved_tensors, dout], gradients)
            return gradients

    def one(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return Attention.apply(q, k, v)

    taken = mock.patch.object(sdpa, "_cudnn_supports", lambda *args: True)
    with taken, mock.patch.object(F, "scaled_dot_product_attention", one):
        yield


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _size(x: Tensor) -> int:
    """Return the bytes that a tensor's values are stored in: once where it is expanded."""
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride or not length else 1
    return count
