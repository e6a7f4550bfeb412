"""Own kernels in Triton: its one import, when rows go through them, and how torch knows the ops.

Triton comes with the builds of torch that know a device. Where it is not there, kernels are plain
functions that nothing calls, so that every file that holds some imports anywhere. A kernel lists
its pointers first, then numbers, then what it is compiled for.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor


def _uncompiled(kernel: Callable[..., None]) -> Any:
    """Return the function alone: there is nothing to compile it."""
    return kernel


# Without devices kernels run in tests alone, which import Triton first and spare all others that.
try:
    if not (torch.version.cuda or torch.version.hip or "triton" in sys.modules):
        raise ImportError("this build of torch knows no device")
    import triton
    import triton.language as tl

    MISSING, jit = "", cast(Any, triton.jit)
except ImportError as error:
    MISSING, jit = str(error), _uncompiled
    tl: Any = SimpleNamespace(constexpr=lambda value: value)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
"""Of rows, and of their numbers, that own kernels take; fp64 goes the plain way."""
ROW_BLOCK = 2048
"""Elements of a block of rows that are moved: of 2 bytes each, two loads of 16 bytes in each of 128
threads."""
_FORCED: ContextVar[bool | None] = ContextVar("forced", default=None)


def why_not(device: str) -> str:
    """Say why rows on this type of device do not go through own kernels; empty where they do.

    ``meta`` is as a GPU, so that a pass traced there counts the operations of a GPU.
    """
    if device == "meta":
        return ""
    if device != "cuda":
        return f"own kernels run on GPUs, not on {device}"
    return f"no Triton: {MISSING}" if MISSING else ""


def fused(x: Tensor) -> bool:
    """Say whether an operation on ``x`` goes through own kernels.

    Asked in the forward; the backward of an operation goes the way of its forward.
    """
    return x.dtype in DTYPES and through(x.device.type)


def through(device: str) -> bool:
    """Say whether rows on this type of device go through own kernels."""
    forced = _FORCED.get()
    return not why_not(device) if forced is None else forced


@contextmanager
def forced(through: bool) -> Iterator[None]:
    """Within this context all rows go through own kernels, or none do, whatever their device."""
    token = _FORCED.set(through)
    try:
        yield
    finally:
        _FORCED.reset(token)


@cache
def generation() -> int:
    """Return the generation of this process's NVIDIA GPU, such as 9 for Hopper; 0 without one."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability()[0]


class Op:
    """An operation of own kernels, known to torch as ``torch.ops.moefold.NAME``.

    Tracing on ``meta``, ``torch.compile`` and counters of FLOPs see one operation.

    Args:
        launch: allocates the results and launches the kernels; its name and annotations are the
            operation's. No result is None, or an argument.
        fake: takes the arguments of ``launch`` and returns empty results of the right shapes; by
            itself nothing.
        changes: names of the arguments that are written in place.
    """

    def __init__(
        self,
        launch: Callable[..., Any],
        fake: Callable[..., Any] = lambda *given: None,
        changes: tuple[str, ...] = (),
    ) -> None:
        name = f"moefold::{launch.__name__}"
        torch.library.define(name, torch.library.infer_schema(launch, mutates_args=changes))
        # On a CPU only the interpreter runs kernels.
        torch.library.impl(name, ("cpu", "cuda"), launch)
        torch.library.register_fake(name, fake)
        self.launch = launch
        self.known = getattr(torch.ops.moefold, launch.__name__).default

    def __call__(self, *args: Any) -> Any:
        """Run the operation, through torch's dispatcher."""
        return self.known(*args)


def in_rows(x: Tensor) -> Tensor:
    """Return what has its last dim's elements beside each other, its rows at any distance."""
    return x if x.stride(-1) == 1 else x.contiguous()


def blocks(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


def row_blocks(rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the grid, and a block's rows and columns: whole rows where they are short."""
    columns = min(power_of_2(width), ROW_BLOCK)
    block = ROW_BLOCK // columns, columns
    return (blocks(rows, block[0]), blocks(width, columns)), block


def power_of_2(least: int) -> int:
    """Return the first power of two from ``least`` on: blocks in kernels have such lengths."""
    return 1 << max(least - 1, 0).bit_length()
