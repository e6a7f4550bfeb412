"""Attention of one block in plain torch, on any device: the reference of the fused kernels.

N segments with S queries and U keys, H query heads, G key-value heads, d and v dims per head.
"""

import torch
from torch import Tensor

from moefold.kernels.rows import upcast_dtype


def forward(
    q_NHSd: Tensor,
    k_NGUd: Tensor,
    v_NGUv: Tensor,
    scale: float,
    causal: bool,
    band: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``out_NHSv`` and the logarithm of each row's softmax denominator, fp32 or wider.

    With ``band = (offset, window)`` query a sees key b where ``0 <= offset + a - b < window``. Rows
    that see no key get zeros and minus infinity.
    """
    q, k, v = repeat_kv(q_NHSd, k_NGUd, v_NGUv, upcast_dtype(q_NHSd))
    scores_NHSU = scores(q, k, scale, causal, band)
    lse_NHS = scores_NHSU.logsumexp(-1)
    base_NHS = lse_NHS.masked_fill(lse_NHS == float("-inf"), 0.0)
    return (scores_NHSU - base_NHS[..., None]).exp() @ v, lse_NHS


def backward(
    grad_NHSv: Tensor,
    q_NHSd: Tensor,
    k_NGUd: Tensor,
    v_NGUv: Tensor,
    out_NHSv: Tensor,
    lse_NHS: Tensor,
    scale: float,
    causal: bool,
    band: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, fp32 or wider.

    ``out_NHSv`` and ``lse_NHS`` are those of whole rows, merged over all blocks.
    """
    wide = lse_NHS.dtype
    kv_heads = k_NGUd.shape[1]
    q, k, v = repeat_kv(q_NHSd, k_NGUd, v_NGUv, wide)
    grad = grad_NHSv.to(wide)
    out = out_NHSv.to(wide)
    weights_NHSU = (scores(q, k, scale, causal, band) - lse_NHS[..., None]).exp()
    dv_NHUv = weights_NHSU.mT @ grad
    delta_NHS1 = (grad * out).sum(-1, keepdim=True)
    dscores_NHSU = weights_NHSU * (grad @ v.mT - delta_NHS1) * scale
    dk_NHUd = dscores_NHSU.mT @ q
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk_NHUd, dv_NHUv))
    return dscores_NHSU @ k, dk, dv


def repeat_kv(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three in ``dtype``, with keys and values repeated for each query head."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(repeat, 1) for x in (k, v))
    return q.to(dtype), k, v


def scores(
    q_NHSd: Tensor,
    k_NHUd: Tensor,
    scale: float,
    causal: bool,
    band: tuple[int, int] | None,
) -> Tensor:
    """Return scaled scores of the results of :func:`repeat_kv`, minus infinity where masked."""
    scores_NHSU = q_NHSd @ k_NHUd.mT * scale
    queries, keys = scores_NHSU.shape[-2:]
    if band is None and not causal:
        return scores_NHSU
    offset, window = band or (0, queries)
    query_S = torch.arange(queries, device=scores_NHSU.device)
    distance_SU = offset + query_S[:, None] - torch.arange(keys, device=scores_NHSU.device)
    hidden_SU = (distance_SU < 0) | (distance_SU >= window)
    return scores_NHSU.masked_fill(hidden_SU, float("-inf"))
