"""Operations written out in the fewest words: what the kernels are compared with."""

import torch
import torch.nn.functional as F
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


def cross_entropy_sum(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Return the summed cross-entropy of the rows whose label is not -100."""
    logits_TV = (x_TD @ head_VD.t()).double()
    return F.cross_entropy(logits_TV, labels_T, reduction="sum")


def norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm by autograd, in fp64."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed * weight_D.double()).to(x.dtype)


def convolution(h_T3C: Tensor, weight_C1K: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Compute the gated one by autograd and torch's own convolution, each document by itself."""
    made_TC = []
    for rows in h_T3C.split(list(lengths)):
        b, c, x = rows.t().chunk(3)
        taps, channels = weight_C1K.shape[-1], len(b)
        mixed = torch.conv1d((b * x)[None], weight_C1K, padding=taps - 1, groups=channels)
        made_TC.append((c * mixed[0, :, : len(rows)]).t())
    return torch.cat(made_TC)


def swiglu(h_N2F: Tensor, p_N: Tensor | None = None) -> Tensor:
    """Return ``p * silu(gate) * up`` for ``h_N2F = [gate, up]``."""
    gate, up = h_N2F.chunk(2, dim=-1)
    a = F.silu(gate) * up
    return a if p_N is None else a * p_N[:, None]
