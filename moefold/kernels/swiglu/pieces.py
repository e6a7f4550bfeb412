"""SwiGLU with an optional weight per row, ``a = p * silu(gate) * up``, and its gradient.

N rows, F width; ``h_N2F`` holds gate then up. The maths is fp32 (or fp64), whatever the storage.
On a GPU each way is one kernel. Elsewhere rows are taken in pieces that stay in cache: on a CPU
memory traffic is what limits this operation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.fused import fused
from moefold.kernels.rows import row_pieces, wide
from moefold.kernels.swiglu import fused as kernels

PIECE = 1 << 17
"""Elements of one piece for each thread, half a megabyte of fp32."""


def forward(h_N2F: Tensor, p_N: Tensor | None) -> Tensor:
    """Return ``a_NF`` in the dtype of ``h_N2F``."""
    if fused(h_N2F):
        return kernels.forward(h_N2F, p_N)
    rows, width = h_N2F.shape[0], h_N2F.shape[1] // 2
    a_NF = h_N2F.new_empty(rows, width)
    for piece in row_pieces(a_NF, PIECE):
        gate, up = wide(h_N2F[piece]).chunk(2, dim=1)
        a = F.silu(gate).mul_(up)
        a_NF[piece] = a if p_N is None else a.mul_(p_N[piece, None])
    return a_NF


def backward(
    h_N2F: Tensor, p_N: Tensor | None, da_NF: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``dh_N2F``, ``dp_N`` (fp32 or fp64; None without ``p_N``) and ``a_NF`` again.

    ``a_NF`` is what the second product's weight gradient needs; it comes out of this pass for
    free, so that forward need not keep it.
    """
    if fused(h_N2F):
        dh_N2F, dp_N, a_NF = kernels.backward(h_N2F, p_N, da_NF)
        return dh_N2F, None if p_N is None else dp_N, a_NF
    width = da_NF.shape[1]
    dh_N2F, a_NF = torch.empty_like(h_N2F), torch.empty_like(da_NF)
    dp_N = None if p_N is None else torch.empty_like(p_N)
    for piece in row_pieces(a_NF, PIECE):
        gate, up = wide(h_N2F[piece]).chunk(2, dim=1)
        da = wide(da_NF[piece])
        silu = F.silu(gate)
        a = silu * up
        if p_N is not None and dp_N is not None:
            p = p_N[piece, None]
            dp_N[piece] = torch.linalg.vecdot(a, da)
            a, da = a.mul_(p), da * p
        a_NF[piece] = a
        dh_N2F[piece, width:] = silu.mul_(da)
        dh_N2F[piece, :width] = torch.ops.aten.silu_backward(da * up, gate)
    return dh_N2F, dp_N, a_NF
