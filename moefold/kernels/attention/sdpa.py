"""Causal attention inside segments by ``scaled_dot_product_attention``.

Neighbouring segments of equal length form one batch, so that a micro-batch of whole sequences is
one call and no pair of rows from different segments is ever computed. Shapes as in ``reference``.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Return ``out_THv``; rows beyond the segments give zeros.

    Where values are narrower than keys they are padded with zeros, which the fused kernels need
    (their fallback is more than twice as slow).
    """
    v_dim, qk_dim = v_TGv.shape[-1], q_THd.shape[-1]
    if v_dim < qk_dim:
        v_TGv = F.pad(v_TGv, (0, qk_dim - v_dim))
    given = (q_THd, k_TGd, v_TGv)
    runs = [(length, len(list(same))) for length, same in groupby(lengths) if length]
    rows = [length * count for length, count in runs]
    tail = q_THd.shape[0] - sum(rows)
    parts = [*rows, tail] if tail else rows
    # A split in one would be joined again in backward, by copies.
    pieces = zip(*(x.split(parts) if len(parts) > 1 else (x,) for x in given), strict=True)
    out = [
        _run(q, k, v, length, scale) for (length, _), (q, k, v) in zip(runs, pieces, strict=False)
    ]
    if not out:
        # Zeros that lead back to the rows: their weights get gradients of zero, never none.
        zero = q_THd[:0].sum() + k_TGd[:0].sum() + v_TGv[:0].sum()
        return zero.expand(tail, q_THd.shape[1], v_dim)
    if tail:
        out.append(q_THd.new_zeros(tail, q_THd.shape[1], v_TGv.shape[-1]))
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return joined[..., :v_dim]


def _run(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Attend inside segments of one length; rows in, rows out."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)
