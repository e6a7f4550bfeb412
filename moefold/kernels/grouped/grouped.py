"""Grouped products by ``torch.nn.functional.grouped_mm``: offsets stay on the device.

Shapes are those of :mod:`moefold.kernels.grouped.loop`. Limits of ``grouped_mm`` (torch 2.11 to
2.13): bf16 and fp32 only, int32 offsets, strides that are multiples of 16 bytes, and an incoming
gradient that is not expanded.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.grouped import loop

UNVERIFIED_DEVICES = ("cuda",)
"""Device types with devices that leave empty groups unwritten (pytorch#172439, #193633)."""


@cache
def leaves_empty_groups_unwritten(device: torch.device) -> bool:
    """Return whether the gradient of an empty group stays uninitialised; tested once per device."""
    x_RI = torch.ones(16, 64, dtype=torch.bfloat16, device=device)
    offs_E = torch.tensor([0, 16], dtype=torch.int32, device=device)
    dirty = [torch.full((2, 64, 64), torch.nan, dtype=x_RI.dtype, device=device) for _ in range(8)]
    del dirty
    return not bool((F.grouped_mm(x_RI.t(), x_RI, offs=offs_E)[0] == 0).all())


def fits(dtype: torch.dtype, *dims: int) -> bool:
    """Return whether ``grouped_mm`` supports this dtype and these row lengths."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    return all(dim * dtype.itemsize % 16 == 0 for dim in dims)


def product(x_RI: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``y_RO`` with ``y[r] = w[group of r] x[r]``."""
    if x_RI.device.type == "cpu" and x_RI.shape[0] < w_EOI.shape[0]:
        # On a CPU ``grouped_mm`` also multiplies empty groups, and here most groups are empty.
        return loop.product(x_RI, w_EOI, offs_E)
    return F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=offs_E)


def input_gradient(dy_RO: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``dx_RI`` with ``dx[r] = w[group of r]^T dy[r]``."""
    return F.grouped_mm(dy_RO, w_EOI, offs=offs_E)


def weight_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor, into_EOI: Tensor | None) -> Tensor:
    """Return ``dw_EOI``, zero for empty groups, added to ``into_EOI`` in place if given."""
    dw_EOI = F.grouped_mm(dy_RO.t(), x_RI, offs=offs_E)
    if dw_EOI.device.type in UNVERIFIED_DEVICES and leaves_empty_groups_unwritten(dw_EOI.device):
        rows_E = torch.diff(offs_E, prepend=offs_E.new_zeros(1))
        dw_EOI = torch.where(rows_E[:, None, None] > 0, dw_EOI, 0)
    return dw_EOI if into_EOI is None else into_EOI.add_(dw_EOI)
