"""KL divergence of the head's distribution from a teacher's, with the vocabulary cut over tp.

T local rows, P rows of the tensor group, C rows of a chunk, D hidden, V vocabulary, v of it local.

With ``p`` and ``q`` the softmax of the teacher's and the model's logits over a temperature t,

    KL = t^2 sum_v p_v (log p_v - log q_v)      d KL / d logits = t (q - p)

so that gradients are as large as those of labels for any t (arXiv 1503.02531, section 2). If only
the K largest p are known, all other tokens are one event in both: with m and r the sums of their
probabilities under p and q, the sum is over these K and ``m (log m - log r)``, and the gradient
uses ``m q_v / r`` as p of each other token.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.comm.collectives import all_gather, gather, max_, reduce_scatter, sum_
from moefold.comm.group import Group
from moefold.data.batch import IGNORE_INDEX
from moefold.kernels.cross_entropy.chunked import accumulate_head_gradient
from moefold.kernels.operand import Operand
from moefold.kernels.rows import upcast_dtype
from moefold.layers.flow import Flow
from moefold.layers.linear import local_vocab_ids
from moefold.layers.loss import apply_with_adapter

Compare = Callable[[Tensor, slice, Group], tuple[Tensor, Tensor]]
"""``compare(logq_Cv, rows, ranks)`` returns this rank's part of the divergence of each row [C], and
``q - p`` [C, v]; it may overwrite the log-probabilities."""


@torch.no_grad()
def divergence_and_gradients(
    x_TD: Tensor,
    head: Operand,
    flow: Flow,
    *,
    compare: Compare,
    temperature: float,
    scale: float | Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the summed divergence, and ``scale`` times its gradient by x_TD.

    The head's gradient, times ``scale``, is added to the master's ``.grad``.

    Args:
        x_TD: normed rows of this rank.
        head: this rank's rows of the head's matrix [V, D].
        flow: the pass; only rows with a label count.
        compare: comparison with the teacher, from :func:`compare_full` or :func:`compare_top`.
        temperature: divisor of the logits.
        scale: factor on the gradients.
        chunk: number of rows whose logits exist at once.
    """
    ranks = flow.world.group("tp")
    labels = flow.whole.rows.labels_T

    def product(x_TD: Tensor, head: Operand) -> tuple[Tensor, Tensor]:
        x_PD = all_gather(x_TD, ranks)
        total = x_PD.new_zeros((), dtype=upcast_dtype(x_PD))
        dx_PD = torch.zeros_like(x_PD)
        for start in range(0, x_PD.shape[0], chunk):
            rows = slice(start, start + chunk)
            counted_C1 = (labels[rows] != IGNORE_INDEX)[:, None]
            x_CD = torch.where(counted_C1, x_PD[rows], 0)
            losses_C, dlogits_Cv = compare(
                _log_softmax(x_CD, head, temperature, ranks), rows, ranks
            )
            losses_C = torch.where(counted_C1[:, 0], losses_C, 0)
            total += losses_C.sum()
            weight_C1 = counted_C1.to(losses_C.dtype).mul_(scale).mul_(temperature)
            dlogits_Cv = dlogits_Cv.mul_(weight_C1).to(head.value.dtype)
            dx_PD[rows] = dlogits_Cv @ head.value
            accumulate_head_gradient(head, dlogits_Cv, x_CD)
            del dlogits_Cv  # so that it is freed before the next chunk's is allocated
        # Each rank has a partial sum, over its part of the vocabulary.
        return total * temperature**2, reduce_scatter(dx_PD, ranks)

    return apply_with_adapter(product, x_TD, head, flow.n_valid)


def compare_full(x_TD: Tensor, head: Operand, temperature: float, flow: Flow) -> Compare:
    """Compare with a teacher's full distribution, given its normed rows and head."""
    x_PD = all_gather(x_TD, flow.world.group("tp"))
    labels = flow.whole.rows.labels_T

    def compare(logq_Cv: Tensor, rows: slice, ranks: Group) -> tuple[Tensor, Tensor]:
        counted_C1 = (labels[rows] != IGNORE_INDEX)[:, None]
        x_CD = torch.where(counted_C1, x_PD[rows], 0)
        logp_Cv = _log_softmax(x_CD, head, temperature, ranks)
        p_Cv = logp_Cv.exp()
        losses_C = logp_Cv.sub_(logq_Cv).mul_(p_Cv).sum(1)
        return losses_C, logq_Cv.exp_().sub_(p_Cv)

    return compare


def compare_top(top_PW: Tensor, head: Operand) -> Compare:
    """Compare the head's distribution with a teacher's largest probabilities.

    ``top_PW`` is what :func:`top_probabilities` returns.
    """

    def compare(logq_Cv: Tensor, rows: slice, ranks: Group) -> tuple[Tensor, Tensor]:
        top_CW = top_PW[rows].to(logq_Cv.dtype)
        k = top_CW.shape[1] // 2
        ids_Ck, logp_Ck, rest_C1 = top_CW.split([k, k, 1], 1)
        is_local_Ck, local_id_Ck = local_vocab_ids(ids_Ck, head.first_row, logq_Cv.shape[1])
        p_Ck = torch.where(is_local_Ck, logp_Ck.exp(), 0)
        logq_Ck = logq_Cv.gather(1, local_id_Ck)
        losses_C = (p_Ck * (logp_Ck - logq_Ck)).sum(1)
        q_Cv = logq_Cv.exp_()
        q_Ck = torch.where(is_local_Ck, q_Cv.gather(1, local_id_Ck), 0)
        q_Cv.scatter_add_(1, local_id_Ck, -q_Ck)  # exactly 0: only the other tokens' q remain
        m_C = rest_C1[:, 0].exp()
        r_C = sum_(q_Cv.sum(1), ranks)
        if ranks.index == 0:
            losses_C += torch.xlogy(m_C, m_C) - torch.xlogy(m_C, r_C)
        ratio_C = torch.where(r_C > 0, m_C / r_C, 0)
        q_Cv.mul_(1 - ratio_C[:, None])
        return losses_C, q_Cv.scatter_add_(1, local_id_Ck, q_Ck - p_Ck)

    return compare


@torch.no_grad()
def top_probabilities(
    x_TD: Tensor, head: Operand, flow: Flow, *, k: int, temperature: float, chunk: int
) -> Tensor:
    """Return the K largest probabilities [P, W] of the tensor group's rows, in fp32 or wider.

    The W = 2 K + 1 numbers of a row are K ids, K log-probabilities, and the logarithm of the sum
    of all other probabilities.
    """
    ranks = flow.world.group("tp")
    x_PD = all_gather(x_TD, ranks)
    wide = upcast_dtype(x_PD)
    top_PW = x_PD.new_zeros(x_PD.shape[0], 2 * k + 1, dtype=wide)
    for start in range(0, x_PD.shape[0], chunk):
        rows = slice(start, start + chunk)
        logp_Cv = _log_softmax(x_PD[rows], head, temperature, ranks)
        local_vocab = logp_Cv.shape[1]
        best, index = logp_Cv.topk(min(k, local_vocab), 1)
        ids = index + head.first_row
        local_2Ck = torch.stack([best, ids.to(wide)])
        # Ranks may have fewer than k tokens, and not all as many: what is missing is never chosen.
        missing = k - best.shape[1]
        local_2Ck = F.pad(local_2Ck, (0, missing), value=-torch.inf)
        shares_R2Ck = gather(local_2Ck, ranks)
        best, ids = shares_R2Ck.permute(1, 2, 0, 3).flatten(2)
        best, index = best.topk(k, 1)
        ids = ids.gather(1, index)
        # Summed, as 1 minus the others would be mere rounding error if few tokens remain.
        is_local, index = local_vocab_ids(ids, head.first_row, local_vocab)
        p_Cv = logp_Cv.exp_()
        p_Ck = torch.where(is_local, p_Cv.gather(1, index), 0)
        p_Cv.scatter_add_(1, index, -p_Ck)
        rest_C1 = sum_(p_Cv.sum(1, keepdim=True), ranks).log_()
        top_PW[rows] = torch.cat([ids, best, rest_C1], 1)
    return top_PW


def _log_softmax(x_CD: Tensor, head: Operand, t: float, ranks: Group) -> Tensor:
    """Return log-probabilities [C, v] of this rank's part of the vocabulary."""
    logits_Cv = x_CD @ head.value.t()
    logits_Cv = logits_Cv.to(upcast_dtype(logits_Cv)).div_(t)
    logits_Cv.sub_(max_(logits_Cv.amax(1, keepdim=True), ranks))
    total_C1 = sum_(logits_Cv.exp().sum(1, keepdim=True), ranks)
    return logits_Cv.sub_(total_C1.log_())
