"""Selection of the implementation of grouped matrix products, with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.fused import device_uses_triton, why_no_triton
from moefold.kernels.grouped import fused, grouped, loop

CPU = torch.device("cpu")
SINGLE_KERNEL = (9, 10)
"""Major compute capabilities on which ``grouped_mm`` multiplies all bf16 groups in one kernel."""


@dataclass(frozen=True)
class GroupedKernel:
    """An implementation of the grouped product and its two gradients."""

    name: str
    reason: str
    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def choose_kernel(
    requested: str, dtype: torch.dtype, *dims: int, device: torch.device = CPU
) -> GroupedKernel:
    """Return the kernel for ``requested`` (``auto``, ``grouped``, ``triton`` or ``loop``).

    Args:
        requested: implementation by name; ``auto`` is the fastest one with correct results.
        dtype: dtype of the rows.
        dims: lengths of the rows.
        device: device of the rows.

    Raises:
        ValueError: the requested implementation does not support the dtype, a dim or the device.
    """
    fits = grouped.fits(dtype, *dims)
    triton = device_uses_triton(device.type) and dtype in fused.DTYPES
    if requested == "grouped" and not fits:
        step = 16 // dtype.itemsize
        raise ValueError(
            f"layout.experts: grouped needs bf16 or fp32 rows of a multiple of 16 bytes, not "
            f"{dtype} of widths {dims}. Use multiples of {step}, or experts: loop"
        )
    if requested == "triton" and not triton:
        supported = dtype in fused.DTYPES
        why = why_no_triton(device.type) if supported else f"Triton kernels do not support {dtype}"
        raise ValueError(f"layout.experts: triton cannot be used: {why}. Use experts: auto")
    reason = "requested"
    if requested == "auto":
        reason = "" if fits else f"grouped_mm does not support {dtype} rows of widths {dims}"
        if not reason and triton:
            reason = why_grouped_mm_waits(dtype, device)
        elif not reason and device.type == "cpu" and dtype.itemsize == 2:
            # The loop, with its rounded row counts, is faster.
            reason = "grouped_mm compiles a kernel for each number of 16-bit rows on CPUs"
        requested = ("triton" if triton else "loop") if reason else "grouped"
        reason = reason or f"supports {dtype} and these widths"
    name = "grouped_mm" if requested == "grouped" else requested
    kernels = {"grouped_mm": grouped, "triton": fused, "loop": loop}[name]
    # ``grouped_mm`` rounds weight gradients of 16-bit rows before they can be added in fp32.
    wgrad = fused if triton and name == "grouped_mm" and dtype.itemsize == 2 else kernels
    return GroupedKernel(
        name, reason, kernels.product, kernels.input_gradient, wgrad.weight_gradient
    )


def why_grouped_mm_waits(dtype: torch.dtype, device: torch.device) -> str:
    """Return why ``grouped_mm`` waits for the GPU group by group; empty where it is one kernel."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "grouped_mm may run group by group on ROCm, and leave empty groups unwritten"
    if dtype != torch.bfloat16:
        return f"grouped_mm runs group by group in {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in SINGLE_KERNEL else f"grouped_mm runs group by group on sm_{major}{minor}"
