"""Causal attention inside segments, written out: what the fast paths are compared with.

T rows, H query heads, G key-value heads, d and v dims per head.
"""

import torch
from torch import Tensor


def attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return ``out_THv``; each row sees the rows of its own segment up to itself.

    Args:
        q_THd: queries.
        k_TGd: keys.
        v_TGv: values.
        lengths: the segments' row counts in order; rows beyond their sum give zeros.
        scale: factor on the scores.
        window: rows that a row sees, itself among them; None is all before it.
        sinks_H: a logit of each head whose value is zero.
    """
    rows, heads = q_THd.shape[:2]
    repeat = heads // k_TGd.shape[1]
    k, v = k_TGd.repeat_interleave(repeat, 1), v_TGv.repeat_interleave(repeat, 1)
    covered = sum(lengths)
    place = torch.arange(covered, device=q_THd.device)
    counts, numbers = torch.tensor(lengths, dtype=torch.int64), torch.arange(len(lengths))
    # Made on the host, where the lengths are known, and carried over once.
    segment = numbers.repeat_interleave(counts, output_size=covered).to(place.device)
    sees = (segment[:, None] == segment[None]) & (place[:, None] >= place[None])
    if window is not None:
        sees &= place[:, None] - place[None] < window
    scores = torch.einsum("qhd,khd->hqk", q_THd[:covered], k[:covered]) * scale
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, covered, 1)], -1)
    weights = scores.softmax(-1)[..., :covered]
    out = torch.einsum("hqk,khv->qhv", weights, v[:covered])
    return torch.cat([out, out.new_zeros(rows - covered, heads, v.shape[-1])])
