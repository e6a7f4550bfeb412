"""Grouped products as a plain loop over the groups: the reference, and the path for any dtype.

R rows sorted by group, E groups, I in, O out; ``offs_E`` (int32) holds each group's end row.
Rows past the last offset are never read; what stands there in an output is unspecified.
"""

import torch
from torch import Tensor


def product(x_RI: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``y_RO`` with ``y[r] = w[group of r] x[r]``."""
    y_RO = x_RI.new_empty(x_RI.shape[0], w_EOI.shape[1])
    for e, start, end in spans(offs_E):
        if start < end:
            torch.mm(x_RI[start:end], w_EOI[e].t(), out=y_RO[start:end])
    return y_RO


def input_gradient(dy_RO: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``dx_RI`` with ``dx[r] = w[group of r]^T dy[r]``."""
    dx_RI = dy_RO.new_empty(dy_RO.shape[0], w_EOI.shape[2])
    for e, start, end in spans(offs_E):
        torch.mm(dy_RO[start:end], w_EOI[e], out=dx_RI[start:end])
    return dx_RI


def weight_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor, into_EOI: Tensor | None) -> Tensor:
    """Return ``dw_EOI``, zero for empty groups, added to ``into_EOI`` in place where given."""
    fresh = into_EOI is None
    if into_EOI is None:
        into_EOI = x_RI.new_zeros(offs_E.shape[0], dy_RO.shape[1], x_RI.shape[1])
    for e, start, end in spans(offs_E):
        if start == end:
            continue
        dy, x = dy_RO[start:end], x_RI[start:end]
        if fresh:
            torch.mm(dy.t(), x, out=into_EOI[e])
        elif into_EOI.dtype == x.dtype:
            into_EOI[e].addmm_(dy.t(), x)
        else:
            into_EOI[e].add_(dy.t() @ x)
    return into_EOI


def spans(offs_E: Tensor) -> list[tuple[int, int, int]]:
    """Return (group, first row, end row) of each group: this path's one host read."""
    ends = offs_E.tolist()
    return [
        (e, start, end) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
