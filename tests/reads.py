"""What makes the host wait for a device, by place: values read in Python, and operators whose
results have a size that depends on values.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moefold.kernels.function import EagerMode

VALUES = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
}
"""Methods that bring a tensor's values to the host."""
SIZED = {
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_dim", "unique_consecutive"),
    *("_unique", "_unique2", "equal", "_local_scalar_dense", "bincount", "is_nonzero"),
}
"""Operators whose result, or its size, is a value."""
Reads = Counter[tuple[str, str]]
"""How often something was read, by what reads it and ``file:line``."""


def place() -> str:
    """Return the innermost line of the project that is running, but for this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and ("/moefold/" in path or "/tests/" in path):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _noted(name: str, seen: Reads, thread: int | None) -> Callable[..., Any]:
    real = getattr(Tensor, name)

    def call(self: Tensor, *args: Any, **more: Any) -> Any:
        if thread in (None, get_ident()):
            seen[name, place()] += 1
        return real(self, *args, **more)

    return call


class _Sizes(EagerMode):
    def __init__(self, seen: Reads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition("::")[2], kwargs or {}
        base = name.partition(".")[0]
        found = base in SIZED
        if base in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = (torch.bool, torch.uint8)
            found = any(one is not None and one.dtype in masks for one in args[1])
        elif base == "repeat_interleave":
            found = isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
        if found:
            self._seen[name, place()] += 1
        return func(*args, **kwargs)


@contextmanager
def watched(thread: int | None = None) -> Iterator[Reads]:
    """Count what is read while open: values by any thread, or the one named, sizes by this one.

    Methods are replaced: what a backward calls passes no mode of torch's functions.
    """
    seen: Reads = Counter()
    noted = {name: _noted(name, seen, thread) for name in VALUES}
    with mock.patch.multiple(Tensor, **noted), _Sizes(seen):  # type: ignore[call-overload]
        yield seen
