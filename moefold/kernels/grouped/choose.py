"""Selection of the implementation of grouped matrix products, with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.fused import through, why_not
from moefold.kernels.grouped import fused, grouped, loop

CPU = torch.device("cpu")
ONE_KERNEL = (9, 10)
"""Major compute capabilities for which ``grouped_mm`` multiplies all bf16 groups in one kernel."""


@dataclass(frozen=True)
class GroupedKernel:
    """One implementation of the grouped product and its two gradients."""

    name: str
    why: str
    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def choose(asked: str, dtype: torch.dtype, *dims: int, device: torch.device = CPU) -> GroupedKernel:
    """Return the kernel for ``asked`` (``auto``, ``grouped``, ``triton`` or ``loop``).

    Args:
        asked: requested implementation; ``auto`` is the fastest one with correct results.
        dtype: dtype of the rows.
        dims: lengths of the rows.
        device: device of the rows.

    Raises:
        ValueError: the requested implementation does not support the dtype, a dim or the device.
    """
    fits, own = grouped.fits(dtype, *dims), through(device.type) and dtype in fused.DTYPES
    if asked == "grouped" and not fits:
        step = 16 // dtype.itemsize
        raise ValueError(
            f"layout.experts: grouped needs bf16 or fp32 rows of a multiple of 16 bytes, not "
            f"{dtype} of widths {dims}. Use multiples of {step}, or experts: loop"
        )
    if asked == "triton" and not own:
        takes = dtype in fused.DTYPES
        missing = why_not(device.type) if takes else f"Triton kernels do not support {dtype}"
        raise ValueError(f"layout.experts: triton cannot be used: {missing}. Use experts: auto")
    why = "requested"
    if asked == "auto":
        why = "" if fits else f"grouped_mm does not support {dtype} rows of widths {dims}"
        if not why and own:
            why = why_library_waits(dtype, device)
        elif not why and device.type == "cpu" and dtype.itemsize == 2:
            # The loop, with its rounded row counts, is faster.
            why = "grouped_mm compiles a kernel for each number of 16-bit rows on CPUs"
        asked = ("triton" if own else "loop") if why else "grouped"
        why = why or f"supports {dtype} and these widths"
    name = "grouped_mm" if asked == "grouped" else asked
    kernels = {"grouped_mm": grouped, "triton": fused, "loop": loop}[name]
    # ``grouped_mm`` rounds the weight gradient of 16-bit rows before it can be added in fp32.
    summed = fused if own and name == "grouped_mm" and dtype.itemsize == 2 else kernels
    return GroupedKernel(name, why, kernels.product, kernels.input_gradient, summed.weight_gradient)


def why_library_waits(dtype: torch.dtype, device: torch.device) -> str:
    """Return why ``grouped_mm`` waits for the GPU group by group; empty where it is one kernel."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "grouped_mm may run group by group on ROCm, and leave empty groups unwritten"
    if dtype != torch.bfloat16:
        return f"grouped_mm runs group by group in {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in ONE_KERNEL else f"grouped_mm runs group by group on sm_{major}{minor}"
