"""Gated linear attention and the gated delta rule over documents, in chunks of rows.

Recurrence of each head, with log decays g per head or per key channel:

    S_t = diag(exp(g_t)) S_(t-1) + k_t u_t^T        o_t = S_t^T q_t
    u_t = b_t (v_t - (diag(exp(g_t)) S_(t-1))^T k_t)    with the delta rule, else v_t

where S is zero before a document's first row. Within a chunk the u are the solution of a unit
triangular system (arXiv 2406.06484; decays: 2412.06464 and, per channel, 2510.26692), so that the
scan has one step per chunk. With G the sum of log decays since the chunk's first row, only
exp(G_i - G_j), i >= j, is computed, which does not overflow.

T rows in P separate runs, N chunks of C rows per run; H heads, of which H / G share a query and key
head; k key and v value dims.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
LEAF = 8
"""Rows of a block in which decays per channel are computed for each pair of rows."""


def recurrent_step(
    state_PHkv: Tensor,
    q_PGk: Tensor,
    k_PGk: Tensor,
    v_PHv: Tensor,
    decay_PHk: Tensor,
    beta_PH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute one row of each of P documents; return ``o_PHv`` and the states after it."""
    q_PHk = repeat_heads(q_PGk, v_PHv)
    k_PHk = repeat_heads(k_PGk, v_PHv)
    state_PHkv = state_PHkv * decay_PHk.exp()[..., None]
    if beta_PH is not None:
        seen_PHv = torch.einsum("phkv,phk->phv", state_PHkv, k_PHk)
        v_PHv = beta_PH[..., None] * (v_PHv - seen_PHv)
    state_PHkv = state_PHkv + k_PHk[..., None] * v_PHv[..., None, :]
    return torch.einsum("phkv,phk->phv", state_PHkv, q_PHk), state_PHkv


def repeat_heads(x_TGk: Tensor, v_THv: Tensor) -> Tensor:
    """Return queries or keys of every value head; neighbouring heads share one."""
    return x_TGk.repeat_interleave(v_THv.shape[1] // x_TGk.shape[1], 1)


def chunked_scan(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    decay_THk: Tensor,
    beta_TH: Tensor | None,
    positions_T: Tensor,
    *,
    chunk: int = CHUNK,
    runs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``o_THv`` and the state ``[P, H, k, v]`` after each run; differentiable.

    All inputs must be finite, those of padding too.

    Args:
        q_TGk: queries.
        k_TGk: keys.
        v_THv: values.
        decay_THk: log decays, at most zero; the last dim is k, or 1 for decays per head.
        beta_TH: rates of the delta rule; None is plain linear attention.
        positions_T: position of each row in its document; position 0 resets the state.
        chunk: C.
        runs: P, if runs may continue documents from other ranks. Results are linear in the state S
            before a run: outputs and states then have k more columns, the factors of S in a term
            to be added. None is one run that begins with a zero state.
    """
    dims = k_TGk.shape[-1]
    length = len(v_THv) // (runs or 1)
    if runs is not None:
        v_THv = F.pad(v_THv, (0, dims))
    by_head = repeat_heads(q_TGk, v_THv), repeat_heads(k_TGk, v_THv), v_THv, decay_THk
    q, k, v, g = (_to_chunks(x, runs or 1, chunk) for x in by_head)
    beta = None if beta_TH is None else _to_chunks(beta_TH[..., None], runs or 1, chunk)
    total = g.cumsum(-2)
    # Documents are numbered within a run; 0 is one that continues from before the run.
    start_PL = positions_T.view(runs or 1, -1) == 0
    numbers = F.pad(start_PL, (0, -length % chunk)).cumsum(1)
    document = numbers.unflatten(1, (-1, chunk))[:, None]
    last = document[..., -1:]
    before = F.pad(last, (0, 0, 1, 0))[..., :-1, :]
    from_start = (document == before)[..., None]
    to_end = (document == last)[..., None]
    same = document[..., None] == document[..., None, :]

    inner = decayed_scores(torch.stack([q] if beta is None else [q, k * beta]), k, total)
    left = v
    inner = inner.where(same, 0)
    grown = total.exp().where(from_start, 0)
    read = q * grown
    faded = (total[..., -1:, :] - total).exp().where(to_end, 0)
    write = (k * faded).mT
    carry = (total[..., -1, :].exp() * (last == before))[..., None]
    if beta is not None:
        right = torch.cat([v * beta, k * beta * grown], -1)
        solved = torch.linalg.solve_triangular(inner[1], right, upper=False, unitriangular=True)
        left, grown = solved.split((v.shape[-1], dims), -1)
    state = v.new_zeros(*k.shape[:2], dims, v.shape[-1])
    if runs is not None:
        state[..., -dims:] = torch.eye(dims, dtype=v.dtype, device=v.device)
    out = list[Tensor]()
    for n in range(v.shape[2]):
        u = left[:, :, n] if beta is None else left[:, :, n] - grown[:, :, n] @ state
        out.append(read[:, :, n] @ state + inner[0][:, :, n] @ u)
        state = carry[:, :, n] * state + write[:, :, n] @ u
    rows = torch.stack(out, 2).flatten(2, 3)[:, :, :length]
    return rows.transpose(1, 2).flatten(0, 1), state


def _to_chunks(x_THx: Tensor, runs: int, chunk: int) -> Tensor:
    """Return rows as ``[P, H, N, C, x]``, each run padded with zeros."""
    x = x_THx.unflatten(0, (runs, -1)).transpose(1, 2)
    missing = -x.shape[2] % chunk
    return F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk))


def decayed_scores(rows: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return ``sum over k of rows_i k_j exp(G_i - G_j)`` for j <= i, else zero, ``[..., C, C]``."""
    length = k.shape[-2]
    if total.shape[-1] > 1 and length > LEAF:
        # Decays between halves are products of the decay up to their border and from it.
        half = length // 2
        cut = (length // 2, length - length // 2)
        (r1, r2), (k1, k2), (g1, g2) = (x.split(cut, -2) for x in (rows, k, total))
        border = g1[..., -1:, :]
        corner = (r2 * (g2 - border).exp()) @ (k1 * (border - g1).exp()).mT
        upper = F.pad(decayed_scores(r1, k1, g1), (0, length - half))
        lower = torch.cat([corner, decayed_scores(r2, k2, g2)], -1)
        return torch.cat([upper, lower], -2)
    causal = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    gap = (total[..., :, None, :] - total[..., None, :, :]).where(causal[..., None], -torch.inf)
    if total.shape[-1] == 1:
        return (rows @ k.mT) * gap[..., 0].exp()
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, k, gap.exp())
