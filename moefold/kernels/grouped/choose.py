"""Which grouped product runs, and why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.grouped import grouped, loop


@dataclass(frozen=True)
class GroupedKernel:
    """One implementation of the grouped product and its two gradients."""

    name: str
    why: str
    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def choose(asked: str, dtype: torch.dtype, *dims: int) -> GroupedKernel:
    """Return the kernel for ``asked`` (``auto``, ``grouped`` or ``loop``), dtype and row lengths.

    Raises:
        ValueError: where ``grouped`` is asked for and cannot take the dtype or a dim.
    """
    fits = grouped.fits(dtype, *dims)
    if asked == "grouped" and not fits:
        step = 16 // dtype.itemsize
        raise ValueError(
            f"layout.experts: grouped takes bf16 and fp32 rows of 16-byte multiples; "
            f"got {dtype} and {dims}. "
            f"Use widths that {step} divides, or experts: loop"
        )
    if asked == "loop" or not fits:
        why = "asked for" if asked == "loop" else f"grouped_mm takes no {dtype} rows of {dims}"
        return GroupedKernel("loop", why, loop.product, loop.input_gradient, loop.weight_gradient)
    why = "asked for" if asked == "grouped" else f"takes {dtype} and these widths"
    return GroupedKernel(
        "grouped_mm", why, grouped.product, grouped.input_gradient, grouped.weight_gradient
    )
