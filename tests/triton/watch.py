"""Watches what programs of a kernel do to memory while Triton's interpreter runs them.

The interpreter follows any address and runs programs one after another, so that what is wrong on a
device looks right. Within :class:`Watch` an access outside of the tensors given to a launch raises,
and so does one that two programs make to the same bytes where either writes: programs run in
any order on a device. They run in a drawn order here.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

NOBODY, SEVERAL = -1, -2


class MemoryFault(Exception):
    """An access outside of the tensors of a launch, or to half an element."""


class Race(Exception):
    """What comes out depends on the order of programs, or of threads."""


class Shadow:
    """What has been done to the bytes of one storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()  # Kept: its place is given to nobody else.
        self.name = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
        size = self.storage.nbytes()
        self.given = np.zeros(size, bool)
        self.loaded, self.stored = np.zeros(size, bool), np.zeros(size, bool)
        self.reader, self.writer = np.full(size, NOBODY), np.full(size, NOBODY)

    def begin(self) -> None:
        """Forget which programs there were: a launch waits for the one before it."""
        self.given[:] = False
        self.reader[:], self.writer[:] = NOBODY, NOBODY


class Watch:
    """Checks every access of the launches inside; ``seed`` draws the order of programs.

    ``loads`` and ``stores`` count bytes, as often as they are read and written; ``atomics`` says
    whether there were any.
    """

    now: "Watch | None" = None

    def __init__(self, seed: int | None = 0) -> None:
        self.seed = seed
        self.atomics = False
        self.program, self.loads, self.stores, self.launches = 0, 0, 0, 0
        self._shadows: dict[int, Shadow] = {}
        self._starts = np.empty(0, np.uint64)
        """Where their storages begin, in order."""
        self._cells: list[tuple[int, ...]] = []

    def __enter__(self) -> "Watch":
        Watch.now = self
        return self

    def __exit__(self, *_: object) -> None:
        Watch.now = None

    def unwritten(self, tensor: Tensor) -> int:
        """Return how many elements of a tensor no program has written."""
        shadow = self._shadows.get(tensor.untyped_storage().data_ptr())
        if shadow is None:
            return tensor.numel()
        return int((~shadow.stored[_bytes_of(tensor)]).sum()) // tensor.element_size()

    @property
    def least(self) -> int:
        """Bytes that are read plus those that are written, each once."""
        return int(sum(s.loaded.sum() + s.stored.sum() for s in self._shadows.values()))

    def begin(self, args: Any) -> None:
        """A launch with these arguments begins."""
        self.launches += 1
        for shadow in self._shadows.values():
            shadow.begin()
        for tensor in _tensors(args):
            start = tensor.untyped_storage().data_ptr()
            shadow = self._shadows.setdefault(start, Shadow(tensor))
            shadow.given[_bytes_of(tensor)] = True
        self._starts = np.array(sorted(self._shadows), np.uint64)

    def draw(self, grid: tuple[int, ...]) -> None:
        """Draw the order of the programs of a grid."""
        self._cells = list(product(*map(range, grid)))
        if self.seed is not None:
            numbered = self._cells.copy()
            random.Random(self.seed).shuffle(self._cells)
            if self._cells == numbered:
                self._cells.reverse()

    def cell(self, place: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the program that runs where ``place`` would."""
        self.program = int(np.ravel_multi_index(place, grid))
        return self._cells[self.program]

    def access(self, pointers: TensorHandle, mask: TensorHandle, kind: str) -> None:
        """Check one load, store or atomic of the running program."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        at = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        if kind == "store" and _repeats(at):
            raise Race("one store writes an element twice")
        self.atomics |= kind == "atomic"
        self.loads += at.size * size * (kind != "store")
        self.stores += at.size * size * (kind != "load")
        for shadow, first in self._found(at, size, kind):
            self._mark(shadow, (first[:, None] + np.arange(size)).reshape(-1), kind)

    def _found(self, at: np.ndarray, size: int, kind: str) -> Iterator[tuple[Shadow, np.ndarray]]:
        owner = np.searchsorted(self._starts, at, side="right").astype(np.int64) - 1
        # Most accesses are to one storage.
        alone = owner.size and owner.min() == owner.max()
        for index in owner[:1] if alone else np.unique(owner):
            if index < 0:
                raise MemoryFault(f"{kind} before every argument")
            start = self._starts[index]
            shadow = self._shadows[int(start)]
            mine = at if alone else at[owner == index]
            first = (mine - start).astype(np.int64)
            if (first % size).any():
                raise MemoryFault(f"{kind} of half an element of {shadow.name}")
            end = shadow.storage.nbytes()
            beyond = (first + size > end) | ~shadow.given[np.minimum(first, end - 1)]
            if beyond.any():
                place = int(first[beyond][0]) // size
                raise MemoryFault(f"{kind} outside of {shadow.name}, at element {place}")
            yield shadow, first

    def _mark(self, shadow: Shadow, at: np.ndarray, kind: str) -> None:
        reads, writes = kind == "load", kind == "store"
        others = [shadow.writer[at], shadow.reader[at]] if kind != "load" else [shadow.writer[at]]
        # Atomics of several programs on one element are no race; with anything else they are.
        if kind == "atomic":
            others = others[1:]
        for who in others:
            free = self._free(who)
            if kind == "atomic":
                free |= who == SEVERAL
            if not free.all():
                raise Race(f"a {kind} of {shadow.name} in which another program has a part")
        if reads:
            seen = shadow.reader[at]
            shadow.reader[at] = np.where(self._free(seen), self.program, SEVERAL)
        elif writes:
            shadow.writer[at] = self.program
        else:
            shadow.writer[at] = SEVERAL
        if not writes:
            shadow.loaded[at] = True
        if not reads:
            shadow.stored[at] = True

    def _free(self, who: np.ndarray) -> np.ndarray:
        """Return which of some bytes no program but the running one has touched."""
        return (who == self.program) | (who == NOBODY)


def _repeats(at: np.ndarray) -> bool:
    """Return whether an address is there twice; those in order are compared with the next alone."""
    ascending = (at[1:] > at[:-1]).all()
    return not ascending and np.unique(at).size != at.size


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the places of a tensor's bytes in its storage."""
    size = tensor.element_size()
    first = torch.arange(tensor.untyped_storage().nbytes() // size)
    own = first.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return (own.reshape(-1, 1).numpy() * size + np.arange(size)).reshape(-1)


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _tensors(arg)
        elif isinstance(getattr(arg, "base", None), Tensor):
            yield arg.base  # of a descriptor
        elif isinstance(arg, Tensor):
            yield arg


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def install() -> None:
    """Let the interpreter of this process report to the open :class:`Watch`."""

    def arguments(method: Any) -> Any:
        def run(self: Any, args: Any, kwargs: Any) -> Any:
            if Watch.now is not None:
                Watch.now.begin([*args, *kwargs.values()])
            return method(self, args, kwargs)

        return run

    def grid(method: Any) -> Any:
        def run(self: Any, *size: int) -> None:
            method(self, *size)
            if Watch.now is not None:
                Watch.now.draw(size)

        return run

    def index(method: Any) -> Any:
        def run(self: Any, *place: int) -> None:
            watch = Watch.now
            method(self, *(place if watch is None else watch.cell(place, self.grid_dim)))

        return run

    def access(kind: str, pointers: int, mask: int) -> Callable[[Any], Any]:
        def around(method: Any) -> Any:
            def run(self: Any, *args: Any) -> Any:
                if Watch.now is not None:
                    Watch.now.access(args[pointers], args[mask], kind)
                return method(self, *args)

            return run

        return around

    _replace(GridExecutor, "_init_args_hst", arguments)
    _replace(InterpreterBuilder, "set_grid_dim", grid)
    _replace(InterpreterBuilder, "set_grid_idx", index)
    _replace(InterpreterBuilder, "create_masked_load", access("load", 0, 1))
    _replace(InterpreterBuilder, "create_masked_store", access("store", 0, 2))
    _replace(InterpreterBuilder, "create_atomic_rmw", access("atomic", 1, 3))
    # Faults keep their names.
    interpreter.triton.knobs.compilation.front_end_debugging = True
