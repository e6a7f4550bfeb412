"""Graphs without a device: the operators of a run, on the very tensors they ran on.

As a CUDA graph does, a tape holds numbers of the host as they were, reads the tensors that the
recorded run read, and writes the memory that it wrote. Otherwise than there what is recorded runs,
so that the first replay has nothing to do, and all memory is the tape's own.
"""

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.reads import watched

Left = TypeVar("Left")
MAKE = ("lift_fresh", "detach", "empty", "new_empty", "empty_like")
"""Operators that compute nothing."""


class Tape(TorchDispatchMode):
    """The operators of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        out, schema = func(*args, **kwargs), func._schema
        views = any(one.alias_info is not None for one in schema.returns)
        writes = any(one.alias_info and one.alias_info.is_write for one in schema.arguments)
        sends = func.namespace == "c10d"
        made = [] if views or sends else [one for one in tree_leaves(out) if torch.is_tensor(one)]
        if (made or writes or sends) and func.name().split("::")[1].split(".")[0] not in MAKE:
            self.calls.append((func, args, kwargs, made))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operators again."""
        self.replays += 1
        for func, args, kwargs, made in self.calls if self.replays > 1 else ():
            out = tree_leaves(func(*args, **kwargs))
            for old, new in zip(made, out if made else (), strict=True):
                old.copy_(new)
            for work in out if func.namespace == "c10d" else ():
                if not torch.is_tensor(work):
                    work.wait()


class Tapes:
    """Records tapes."""

    made = 0
    """By all recorders."""

    def __call__(self, function: Callable[[], Left]) -> tuple[Tape, Left]:
        """Record one.

        Raises:
            RuntimeError: where a value is read.
        """
        tape, wait = Tape(), dist.Work.wait

        def waiting(work: dist.Work, *given: Any) -> bool:
            with _disable_current_modes():  # Gloo copies sums where a replay's wait will do so too.
                return wait(work, *given)

        with watched() as seen, mock.patch.object(dist.Work, "wait", waiting), tape:
            left = function()
        if seen:
            raise RuntimeError(f"operation not permitted when stream is capturing: {dict(seen)}")
        Tapes.made += 1
        return tape, left
