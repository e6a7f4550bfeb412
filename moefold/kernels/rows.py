"""Helpers of the plain-torch kernels: chunks of rows, wide dtypes, and the expert of each row."""

import torch
from torch import Tensor

PIECE = 1 << 18
"""Elements of a piece per CPU thread: one megabyte of fp32."""
DEVICE_PIECE = 1 << 26
"""Elements of a piece on an accelerator: a quarter of a gigabyte of fp32."""
LARGEST_STEP = 64
"""Largest :func:`row_step`, from 512 rows on: on average 32 extra rows, cheaper than compiling."""


def row_pieces(x_ND: Tensor, block: int = 1) -> list[slice]:
    """Return slices that cover the N rows in order; each but the last is a multiple of ``block``.

    On a CPU a piece stays in the threads' caches between element-wise passes. On an accelerator,
    where each launch costs time, pieces only bound temporary memory.
    """
    on_cpu = x_ND.device.type == "cpu"
    elements = PIECE * torch.get_num_threads() if on_cpu else DEVICE_PIECE
    step = max(1, elements // max(x_ND.shape[1] * block, 1)) * block
    return [slice(start, start + step) for start in range(0, x_ND.shape[0], step)]


def row_step(rows: int, like: Tensor) -> int:
    """Return the multiple to which ``rows`` are best rounded up for a product; 1 for no rounding.

    On a CPU, oneDNN compiles a 16-bit product for each row count that it meets, which often takes
    longer than the product itself. With row counts rounded to multiples of about an eighth of a
    power of two, most of them are compiled after the first training step.
    """
    if like.device.type != "cpu" or like.dtype.itemsize != 2:
        return 1
    return max(1, min(LARGEST_STEP, (1 << rows.bit_length()) >> 4))


def wide(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 is returned unchanged."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the result of :func:`wide`."""
    return torch.promote_types(x.dtype, torch.float32)


def expert_of_rows(offs_E: Tensor, rows: int) -> Tensor:
    """Return the expert index (int64 [R]) of each of ``rows`` rows; E past the last offset."""
    place_R = torch.arange(rows, device=offs_E.device, dtype=offs_E.dtype)
    return torch.searchsorted(offs_E, place_R, right=True)
