"""SwiGLU with an optional weight per row, ``a = p * silu(gate) * up``, and its gradient.

N rows, F width; ``h_N2F`` holds gate, then up. Arithmetic is fp32 (or fp64) for every storage
dtype. On a GPU forward and backward are one kernel each. On a CPU, where memory traffic limits this
operation, rows are processed in chunks that stay in cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.fused import uses_triton
from moefold.kernels.rows import row_chunks, upcast
from moefold.kernels.swiglu import fused as kernels


def forward(h_N2F: Tensor, p_N: Tensor | None) -> Tensor:
    """Return ``a_NF`` in the dtype of ``h_N2F``."""
    if uses_triton(h_N2F):
        return kernels.forward(h_N2F, p_N)
    rows = h_N2F.shape[0]
    width = h_N2F.shape[1] // 2
    a_NF = h_N2F.new_empty(rows, width)
    for chunk in row_chunks(a_NF):
        gate, up = upcast(h_N2F[chunk]).chunk(2, dim=1)
        into = a_NF[chunk] if gate.dtype == a_NF.dtype else None
        a = torch.mul(F.silu(gate), up, out=into)
        if p_N is not None:
            a.mul_(p_N[chunk, None])
        if into is None:
            a_NF[chunk] = a
    return a_NF


def backward(
    h_N2F: Tensor, p_N: Tensor | None, da_NF: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``dh_N2F``, ``dp_N`` (fp32 or fp64; None without ``p_N``) and the recomputed ``a_NF``.

    The weight gradient of the second product needs ``a_NF``; this pass recomputes it at no extra
    cost, so that forward need not save it.
    """
    if uses_triton(h_N2F):
        dh_N2F, dp_N, a_NF = kernels.backward(h_N2F, p_N, da_NF)
        return dh_N2F, None if p_N is None else dp_N, a_NF
    dh_N2F = torch.empty_like(h_N2F)
    a_NF = torch.empty_like(da_NF)
    dp_N = None if p_N is None else torch.empty_like(p_N)
    for chunk in row_chunks(a_NF):
        gate, up = upcast(h_N2F[chunk]).chunk(2, dim=1)
        da = upcast(da_NF[chunk])
        (dgate, dup) = dh_N2F[chunk].chunk(2, dim=1)
        # Wide results are written to their destination directly: a copy would be one pass in four.
        in_place = gate.dtype == dh_N2F.dtype
        silu = F.silu(gate)
        a = torch.mul(silu, up, out=a_NF[chunk] if in_place else None)
        if p_N is not None and dp_N is not None:
            p = p_N[chunk, None]
            dp_N[chunk] = torch.linalg.vecdot(a, da)
            a = a.mul_(p)
            da = da * p
        if in_place:
            torch.mul(silu, da, out=dup)
            torch.mul(da, up, out=silu)
            torch.ops.aten.silu_backward.grad_input(silu, gate, grad_input=dgate)
        else:
            a_NF[chunk] = a
            dup.copy_(silu.mul_(da))
            dgate.copy_(torch.ops.aten.silu_backward(da * up, gate))
    return dh_N2F, dp_N, a_NF
