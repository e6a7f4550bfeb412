"""Rows as plain kernels take them: in pieces, in wide numbers, and by the expert they are of."""

import torch
from torch import Tensor

PIECE = 1 << 18
"""Elements of one piece for each thread of a CPU, a megabyte of fp32."""
DEVICE_PIECE = 1 << 26
"""Elements of one piece on an accelerator: a quarter of a gigabyte of fp32."""
LARGEST_STEP = 64
"""Rows, from 512 on: half of it beyond what is asked for costs less than compiling."""


def row_pieces(x_ND: Tensor, block: int = 1) -> list[slice]:
    """Return slices that cover the N rows in order, whole blocks of rows each but the last.

    On a CPU a piece stays in the threads' caches between the passes. An accelerator has no such
    cache and pays for each launch: pieces there only bound what the passes hold at once.
    """
    on_cpu = x_ND.device.type == "cpu"
    elements = PIECE * torch.get_num_threads() if on_cpu else DEVICE_PIECE
    step = max(1, elements // max(x_ND.shape[1] * block, 1)) * block
    return [slice(start, start + step) for start in range(0, x_ND.shape[0], step)]


def row_step(rows: int, like: Tensor) -> int:
    """Return the step in which so many rows are best multiplied: by 1, wherever any number is.

    On a CPU oneDNN compiles a 16-bit product for each number of rows that it meets, which takes
    longer than many a product: of few numbers, at most one to an eighth of a power of two, it knows
    most after a step.
    """
    if like.device.type != "cpu" or like.dtype.itemsize != 2:
        return 1
    return max(1, min(LARGEST_STEP, (1 << rows.bit_length()) >> 4))


def wide(x: Tensor) -> Tensor:
    """Return numbers in fp32, and fp64 as they are."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that :func:`wide` gives."""
    return torch.promote_types(x.dtype, torch.float32)


def expert_of_rows(offs_E: Tensor, rows: int) -> Tensor:
    """Return the int64 expert [R] of each of so many rows, E of those past the last offset."""
    place_R = torch.arange(rows, device=offs_E.device, dtype=offs_E.dtype)
    return torch.searchsorted(offs_E, place_R, right=True)
