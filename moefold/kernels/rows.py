"""Helpers of the plain-torch kernels: chunks of rows, upcasting, and the expert of each row."""

import torch
from torch import Tensor

CPU_CHUNK = 1 << 18
"""Elements of a chunk per CPU thread: one megabyte of fp32."""
DEVICE_CHUNK = 1 << 26
"""Elements of a chunk on an accelerator: a quarter of a gigabyte of fp32."""
MAX_ROW_MULTIPLE = 64
"""Largest :func:`row_multiple`, from 512 rows on: 32 extra rows on average, less than compiling."""


def row_chunks(x_ND: Tensor, block: int = 1) -> list[slice]:
    """Return slices that cover the N rows in order; each but the last is a multiple of ``block``.

    On a CPU a chunk stays in the threads' caches between element-wise passes. On an accelerator,
    where each launch costs time, chunks only bound temporary memory.
    """
    on_cpu = x_ND.device.type == "cpu"
    elements = CPU_CHUNK * torch.get_num_threads() if on_cpu else DEVICE_CHUNK
    step = max(1, elements // max(x_ND.shape[1] * block, 1)) * block
    return [slice(start, start + step) for start in range(0, x_ND.shape[0], step)]


def row_multiple(rows: int, like: Tensor) -> int:
    """Return the multiple to which a product's row count should be rounded up; 1 for none.

    On a CPU, oneDNN compiles a 16-bit product for each new row count, which often takes
    longer than the product itself. With row counts rounded to multiples of about an eighth of a
    power of two, most of them are compiled after the first training step.
    """
    if like.device.type != "cpu" or like.dtype.itemsize != 2:
        return 1
    return max(1, min(MAX_ROW_MULTIPLE, (1 << rows.bit_length()) >> 4))


def upcast(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 is returned unchanged."""
    return x.to(upcast_dtype(x))


def upcast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the result of :func:`upcast`."""
    return torch.promote_types(x.dtype, torch.float32)


def expert_of_rows(offs_E: Tensor, rows: int) -> Tensor:
    """Return the expert index (int64 [R]) of each of ``rows`` rows; E past the last offset."""
    row_R = torch.arange(rows, device=offs_E.device, dtype=offs_E.dtype)
    return torch.searchsorted(offs_E, row_R, right=True)
