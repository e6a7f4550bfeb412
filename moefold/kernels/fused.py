"""Shared base of the Triton kernels: the only import of Triton, path selection, torch operators.

Triton comes with builds of torch that support a GPU. Without it kernels are plain functions that
nothing calls, so that files with kernels can be imported everywhere. A kernel's parameters are
ordered: pointers, then numbers, then compile-time constants.
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

# Without a GPU only tests run kernels, and import Triton first; others need not import it.
try:
    if not (torch.version.cuda or torch.version.hip or "triton" in sys.modules):
        raise ImportError("this build of torch supports no GPU")
    import triton
    import triton.language as tl

    IMPORT_ERROR = ""
    jit = cast(Any, triton.jit)
except ImportError as error:
    IMPORT_ERROR = str(error)
    jit = cast(Any, lambda kernel: kernel)
    tl: Any = SimpleNamespace(constexpr=lambda value: value)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
"""Dtypes of rows and of row indices that Triton kernels take; fp64 uses plain torch."""
ROW_BLOCK = 2048
"""Elements of a block in kernels that copy rows: with 2 bytes each, two 16-byte loads in each of
128 threads."""
_FORCED: ContextVar[bool | None] = ContextVar("force_triton", default=None)


def why_no_triton(device: str) -> str:
    """Return why this device type cannot run Triton kernels; empty if it can.

    ``meta`` is treated as a GPU, so that a pass traced there counts the operations of a GPU.
    """
    if device == "meta":
        return ""
    if device != "cuda":
        return f"Triton kernels run on GPUs, not on {device}"
    return f"Triton is missing: {IMPORT_ERROR}" if IMPORT_ERROR else ""


def uses_triton(x: Tensor) -> bool:
    """Return whether an operation on ``x`` uses Triton kernels.

    Forward passes decide this; a backward pass uses the path of its forward.
    """
    return x.dtype in DTYPES and device_uses_triton(x.device.type)


def device_uses_triton(device: str) -> bool:
    """Return whether rows on this device type use Triton kernels."""
    forced = _FORCED.get()
    return not why_no_triton(device) if forced is None else forced


@contextmanager
def force_triton(enabled: bool) -> Iterator[None]:
    """Make every operation, on every device, use Triton kernels (or none) within this context."""
    token = _FORCED.set(enabled)
    try:
        yield
    finally:
        _FORCED.reset(token)


@cache
def compute_capability_major() -> int:
    """Return the major compute capability of an NVIDIA GPU, such as 9 for Hopper; 0 without one."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability()[0]


class Op:
    """A custom operator implemented by Triton kernels, registered as ``torch.ops.moefold.NAME``.

    Tracing on ``meta``, ``torch.compile`` and FLOP counters see one operation.

    Args:
        launch: allocates results and launches kernels; the operator takes its name and schema
            from this function. No result may be None or one of the arguments.
        fake: takes the arguments of ``launch`` and returns empty results of the right shapes; by
            default None.
        mutates_args: names of the arguments that are written in place.
    """

    def __init__(
        self,
        launch: Callable[..., Any],
        fake: Callable[..., Any] = lambda *args: None,
        mutates_args: tuple[str, ...] = (),
    ) -> None:
        name = f"moefold::{launch.__name__}"
        torch.library.define(name, torch.library.infer_schema(launch, mutates_args=mutates_args))
        # On a CPU only the tests' interpreter runs kernels.
        torch.library.impl(name, ("cpu", "cuda"), launch)
        torch.library.register_fake(name, fake)
        self.launch = launch
        self.overload = getattr(torch.ops.moefold, launch.__name__).default

    def __call__(self, *args: Any) -> Any:
        """Run the operation, through torch's dispatcher."""
        return self.overload(*args)


def contiguous_in_rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous elements in its last dim; rows may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cdiv(length: int, block: int) -> int:
    """Return ``length / block``, rounded up."""
    return -(-length // block)


def row_grid(rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the grid, and a block's rows and columns; a block spans the whole width if small."""
    columns = min(next_power_of_2(width), ROW_BLOCK)
    block = ROW_BLOCK // columns, columns
    return (cdiv(rows, block[0]), cdiv(width, columns)), block


def next_power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least ``least``, as blocks in kernels need."""
    return 1 << max(least - 1, 0).bit_length()
