"""Grouped products as a loop over groups: the reference, and the fallback for any dtype.

R rows sorted by group, E groups, I in, O out; ``offs_E`` (int32) holds each group's end row.
Rows past the last offset affect no other row; their outputs are unspecified.
"""

import torch
from torch import Tensor

from moefold.kernels.linear.product import weight_gradient as add_weight_gradient
from moefold.kernels.rows import row_multiple, upcast_dtype


def product(x_RI: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``y_RO`` with ``y[r] = w[group of r] x[r]``."""
    return _by_group(x_RI, w_EOI.transpose(1, 2), offs_E)


def input_gradient(dy_RO: Tensor, w_EOI: Tensor, offs_E: Tensor) -> Tensor:
    """Return ``dx_RI`` with ``dx[r] = w[group of r]^T dy[r]``."""
    return _by_group(dy_RO, w_EOI, offs_E)


def _by_group(x_RI: Tensor, w_EIO: Tensor, offs_E: Tensor) -> Tensor:
    rows = x_RI.shape[0]
    y_RO = x_RI.new_empty(rows, w_EIO.shape[2])
    for e, start, end in group_spans(offs_E):
        multiple = row_multiple(end - start, x_RI)
        stop = start - (start - end) // multiple * multiple
        if start == end or stop <= rows:
            # Output rows beyond this group are overwritten by later groups.
            torch.mm(x_RI[start:stop], w_EIO[e], out=y_RO[start:stop])
        else:
            first = max(0, rows - (stop - start))
            y_RO[start:end] = (x_RI[first:] @ w_EIO[e])[start - first : end - first]
    return y_RO


def weight_gradient(dy_RO: Tensor, x_RI: Tensor, offs_E: Tensor, into_EOI: Tensor | None) -> Tensor:
    """Return ``dw_EOI``, zero for empty groups, added to ``into_EOI`` in place if given."""
    if into_EOI is None:
        shape = offs_E.shape[0], dy_RO.shape[1], x_RI.shape[1]
        into_EOI = x_RI.new_zeros(shape, dtype=upcast_dtype(x_RI))
    for e, start, end in group_spans(offs_E):
        if start == end:
            continue
        add_weight_gradient(dy_RO[start:end], x_RI[start:end], into_EOI[e])
    return into_EOI


def group_spans(offs_E: Tensor) -> list[tuple[int, int, int]]:
    """Return (group, first row, end row) of each group: the only host read of this path."""
    ends = offs_E.tolist()
    starts = [0, *ends[:-1]]
    return [(e, start, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True))]
