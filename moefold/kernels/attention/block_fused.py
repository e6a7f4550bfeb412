"""Attention of one block by the flash kernels behind ``scaled_dot_product_attention``.

They return the log-sum-exp needed to merge blocks, and their backward accepts that of merged rows.
Keys and values must have equal widths, so that narrower ones are padded with zeros. Shapes are
those of ``block_plain``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
MAX_CUDA_WIDTH = 256
"""Largest head width of the CUDA kernel, which reads dims in vectors of eight."""
FP32_LIMIT = 1 << 14
"""Elements of a head's queries up to which backward of 16-bit rows is faster in fp32 on a CPU,
where each small block is repacked for its products: 512 rows of 32 dims take 0.7 of the time."""


def fits(q_NHSd: Tensor, v_NGUv: Tensor) -> bool:
    """Return whether a kernel supports the device, dtype and head widths."""
    if q_NHSd.is_cpu:
        return True
    narrow = q_NHSd.dtype in (torch.bfloat16, torch.float16)
    # Tensors on meta are treated as on a GPU.
    on_gpu = q_NHSd.is_cuda or q_NHSd.is_meta
    return on_gpu and narrow and _width(q_NHSd, v_NGUv) <= MAX_CUDA_WIDTH


def forward(
    q_NHSd: Tensor, k_NGUd: Tensor, v_NGUv: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return ``out_NHSv`` in the queries' dtype, and ``lse_NHS`` in fp32 or wider."""
    width = _width(q_NHSd, v_NGUv)
    v_dim = v_NGUv.shape[-1]
    q, k, v = (_padded(x, width) for x in (q_NHSd, k_NGUd, v_NGUv))
    if q.is_cpu:
        out, lse_NHS = _CPU(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse_NHS, *_ = _CUDA(q, k, v, 0.0, causal, False, scale=scale)
    return out[..., :v_dim], lse_NHS


def backward(
    grad_NHSv: Tensor,
    q_NHSd: Tensor,
    k_NGUd: Tensor,
    v_NGUv: Tensor,
    out_NHSv: Tensor,
    lse_NHS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values in the queries' dtype."""
    width = _width(q_NHSd, v_NGUv)
    d = q_NHSd.shape[-1]
    v_dim = v_NGUv.shape[-1]
    widened = q_NHSd.is_cpu and q_NHSd.shape[-2] * width <= FP32_LIMIT
    dtype = lse_NHS.dtype if widened else q_NHSd.dtype
    inputs = (grad_NHSv, q_NHSd, k_NGUd, v_NGUv, out_NHSv)
    grad, q, k, v, out = (_padded(x.to(dtype), width) for x in inputs)
    lse = lse_NHS.contiguous()
    if q.is_cpu:
        dq, dk, dv = _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    else:
        # Placeholder for the random state of dropout, which is off.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        rows = q.shape[2]
        keys = k.shape[2]
        args = (None, None, rows, keys, 0.0, causal, rng_state, rng_state[:0])
        dq, dk, dv = _CUDA_BACKWARD(grad, q, k, v, out, lse, *args, scale=scale)
    dq, dk, dv = (x.to(q_NHSd.dtype) for x in (dq, dk, dv))
    return dq[..., :d], dk[..., :d], dv[..., :v_dim]


def _width(q_NHSd: Tensor, v_NGUv: Tensor) -> int:
    widest = max(q_NHSd.shape[-1], v_NGUv.shape[-1])
    return widest if q_NHSd.is_cpu else -(-widest // 8) * 8


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
