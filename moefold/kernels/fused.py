"""Basis of this package's Triton kernels: the only import of Triton, path selection, torch ops.

Triton is installed with builds of torch that support a GPU. Without it kernels are plain functions
that nothing calls, so that files with kernels can be imported everywhere. Parameters of a kernel
are ordered: pointers, then numbers, then compile-time constants.
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

# Without a GPU only tests run kernels. They import Triton first; others are spared that import.
try:
    if not (torch.version.cuda or torch.version.hip or "triton" in sys.modules):
        raise ImportError("this build of torch supports no GPU")
    import triton
    import triton.language as tl

    MISSING, jit = "", cast(Any, triton.jit)
except ImportError as error:
    MISSING, jit = str(error), cast(Any, lambda kernel: kernel)
    tl: Any = SimpleNamespace(constexpr=lambda value: value)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
"""Dtypes of rows and of row indices that Triton kernels take; fp64 uses plain torch."""
ROW_BLOCK = 2048
"""Elements of a block in kernels that copy rows: with 2 bytes each, two 16-byte loads in each of
128 threads."""
_FORCED: ContextVar[bool | None] = ContextVar("forced", default=None)


def why_not(device: str) -> str:
    """Return why rows on this device type do not use Triton kernels; empty where they do.

    ``meta`` is treated as a GPU, so that a pass traced there counts the operations of a GPU.
    """
    if device == "meta":
        return ""
    if device != "cuda":
        return f"Triton kernels run on GPUs, not on {device}"
    return f"Triton is missing: {MISSING}" if MISSING else ""


def fused(x: Tensor) -> bool:
    """Return whether an operation on ``x`` uses Triton kernels.

    Forward passes decide this; a backward pass uses the path of its forward.
    """
    return x.dtype in DTYPES and through(x.device.type)


def through(device: str) -> bool:
    """Return whether rows on this device type use Triton kernels."""
    forced = _FORCED.get()
    return not why_not(device) if forced is None else forced


@contextmanager
def forced(through: bool) -> Iterator[None]:
    """Within this context all rows use Triton kernels, or none do, on every device."""
    token = _FORCED.set(through)
    try:
        yield
    finally:
        _FORCED.reset(token)


@cache
def generation() -> int:
    """Return the major compute capability of an NVIDIA GPU, such as 9 for Hopper; 0 without one."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability()[0]


class Op:
    """A custom operator made of Triton kernels, registered as ``torch.ops.moefold.NAME``.

    Tracing on ``meta``, ``torch.compile`` and FLOP counters see one operation.

    Args:
        launch: allocates results and launches kernels; the operator takes its name and schema
            from this function. No result may be None or one of the arguments.
        fake: takes the arguments of ``launch`` and returns empty results of the right shapes; by
            default None.
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
        # On a CPU only the tests' interpreter runs kernels.
        torch.library.impl(name, ("cpu", "cuda"), launch)
        torch.library.register_fake(name, fake)
        self.launch = launch
        self.known = getattr(torch.ops.moefold, launch.__name__).default

    def __call__(self, *args: Any) -> Any:
        """Run the operation, through torch's dispatcher."""
        return self.known(*args)


def in_rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous elements in its last dim; rows may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def blocks(length: int, block: int) -> int:
    """Return the number of blocks that cover a length."""
    return -(-length // block)


def row_blocks(rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the grid, and rows and columns of a block, which spans the width where it is small."""
    columns = min(power_of_2(width), ROW_BLOCK)
    block = ROW_BLOCK // columns, columns
    return (blocks(rows, block[0]), blocks(width, columns)), block


def power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least ``least``, as blocks in kernels need."""
    return 1 << max(least - 1, 0).bit_length()
