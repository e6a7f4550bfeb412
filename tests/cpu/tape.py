"""Graphs without a device: the operators of a run, on the very tensors they ran on.

As a CUDA graph does, a tape holds numbers of the host as they were, reads the tensors that the
recorded run read, and writes the memory that it wrote. Otherwise than there what is recorded runs,
so that the first replay has nothing to do. Tapes of one recorder share memory as graphs of one pool
do: what earlier ones made and nobody held any more as a tape began, that one may write on, and so a
replay of it fills it with what no result can be made of.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from moefold.comm import collectives
from moefold.kernels.function import EagerMode
from moefold.parallel.pipeline.recording import Graph
from tests.reads import watched

WAIT = dist.Work.wait
BEGIN = collectives.Pending.__init__
MAKE = ("lift_fresh", "detach", "empty", "new_empty", "empty_like")
"""Operators that compute nothing."""


ALIASES = Counter[int]()
"""How many tensors of tapes lie in a storage: all that ever did, so that it stays what it is."""
HELD = list[Tensor]()


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor of a tape's own in the same storage."""
    ALIASES[tensor.untyped_storage()._cdata] += 1
    HELD.append(tensor.detach())
    return HELD[-1]


def free(tensor: Tensor) -> bool:
    """Whether nothing but tapes holds a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= ALIASES[storage._cdata] + 1


class Tape(EagerMode):
    """The operators of one run."""

    def __init__(self, pool: dict[int, Tensor]) -> None:
        super().__init__()
        self.pool = pool
        """What tapes of its recorder have made, by storage."""
        self.free = [one for one in pool.values() if free(one)]
        """What of it was let go as this one began."""
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.waits: dict[int, list[int]] = defaultdict(list)
        """By the number of calls before it: those that are waited for then."""
        self.replays = 0
        self._thread, self._works = get_ident(), dict[int, tuple[Any, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        out, schema = func(*args, **kwargs), func._schema
        views = any(one.alias_info is not None for one in schema.returns)
        writes = any(one.alias_info and one.alias_info.is_write for one in schema.arguments)
        sends = func.namespace == "c10d"
        made = [] if views or sends else [one for one in tree_leaves(out) if torch.is_tensor(one)]
        for one in [] if writes else made:
            self.pool.setdefault(one.untyped_storage()._cdata, alias(one))
        args, kwargs, made = tree_map_only(Tensor, alias, (args, kwargs, made))
        if (made or writes or sends) and func.name().split("::")[1].split(".")[0] not in MAKE:
            self.calls.append((func, args, kwargs, made))
        return out

    def begun(self, pending: collectives.Pending, works: Any = (), *given: Any) -> None:
        """Note which calls have begun what will be waited for."""
        BEGIN(pending, works, *given)
        if get_ident() == self._thread:
            sent = [at for at, call in enumerate(self.calls) if call[0].namespace == "c10d"]
            begun = zip(works, sent[len(sent) - len(works) :], strict=True)
            self._works.update((id(work), (work, at)) for work, at in begun)

    def waiting(self, work: dist.Work, *given: Any) -> bool:
        """Wait as the run does, and note for what: what is under way may need what comes first."""
        if get_ident() == self._thread:
            now = len(self.calls)
            self.waits[now].append(self._works.get(id(work), (work, now - 1))[1])
        with _disable_current_modes():  # Gloo copies sums where a replay's wait will do so too.
            return WAIT(work, *given)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operators again."""
        self.replays += 1
        for one in self.free if self.replays > 1 else ():
            one.fill_(torch.nan if one.is_floating_point() else 1 << 6)
        under_way: dict[int, list[Any]] = {}
        for at, (func, args, kwargs, made) in enumerate(self.calls if self.replays > 1 else ()):
            out = tree_leaves(func(*args, **kwargs))
            for old, new in zip(made, out if made else (), strict=True):
                old.copy_(new)
            if func.namespace == "c10d":
                under_way[at] = [work for work in out if not torch.is_tensor(work)]
            for one in self.waits.get(at + 1, ()):
                for work in under_way.pop(one, ()):
                    work.wait()
        assert not under_way, "what a graph sends is waited for in it"


class Tapes:
    """Records tapes."""

    made = 0
    """By all recorders."""

    def __init__(self) -> None:
        self._pool = dict[int, Tensor]()

    def __call__(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """Record one.

        Raises:
            RuntimeError: where a value is read.
        """
        with recording(self._pool) as tape:
            left = function()
        Tapes.made += 1
        return tape.replay, left


@contextmanager
def recording(pool: dict[int, Tensor]) -> Iterator[Tape]:
    """Record a tape while open, with the memory of those of ``pool``.

    Raises:
        RuntimeError: where a value was read.
    """
    tape = Tape(pool)
    with ExitStack() as stack:
        for home, name, note in (
            (collectives.Pending, "__init__", tape.begun), (dist.Work, "wait", tape.waiting)
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(home, name, _method(note)))
        seen = stack.enter_context(watched(get_ident()))
        stack.enter_context(tape)
        yield tape
    if seen:
        raise RuntimeError(f"operation not permitted when stream is capturing: {dict(seen)}")


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that as a method is given its object, which a bound method is not."""
    return lambda *given: function(*given)
