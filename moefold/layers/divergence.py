"""Divergence of the head's distribution from a teacher's, where tensor ranks share the vocabulary.

T rows here, P rows of the tensor group, C rows of a chunk, D hidden, V vocabulary, v of it here.

With ``p`` and ``q`` the softmax of the teacher's and the model's logits over a temperature t,

    KL = t^2 sum_v p_v (log p_v - log q_v)      d KL / d logits = t (q - p)

which keeps gradients as large as those of labels, whatever t (arXiv 1503.02531, section 2).
"""

from functools import partial

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, max_, reduce_scatter, sum_
from moefold.comm.group import Group
from moefold.data.batch import IGNORED
from moefold.kernels.cross_entropy.chunked import accumulate_head
from moefold.kernels.operand import Operand
from moefold.layers.flow import Flow
from moefold.layers.loss import widening


@torch.no_grad()
def divergence_and_gradients(
    x_TD: Tensor,
    head: Operand,
    flow: Flow,
    *,
    teacher: tuple[Tensor, Operand],
    temperature: float,
    scale: float | Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the summed divergence, and ``scale`` times its gradient.

    The head's gradient, times ``scale``, is added to the master's ``.grad``.

    Args:
        x_TD: normed rows of this rank.
        head: the head's matrix [V, D], this rank's share of its rows.
        flow: the pass; rows with a label count.
        teacher: its normed rows, as many, and its head.
        temperature: what logits are divided by.
        scale: factor on the gradient by the rows.
        chunk: rows whose logits exist at once.
    """
    more = {"flow": flow, "teacher": teacher, "t": temperature, "scale": scale, "chunk": chunk}
    return widening(partial(_divergence, **more), x_TD, head, flow.n_valid)


def _divergence(
    x_TD: Tensor,
    head: Operand,
    flow: Flow,
    teacher: tuple[Tensor, Operand],
    t: float,
    scale: float | Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    ranks, labels = flow.world.group("tp"), flow.whole.rows.labels_T
    x_PD, rows_PD, theirs = all_gather(x_TD, ranks), all_gather(teacher[0], ranks), teacher[1]
    total = x_PD.new_zeros((), dtype=torch.promote_types(x_PD.dtype, torch.float32))
    dx_PD = torch.zeros_like(x_PD)
    for start in range(0, x_PD.shape[0], chunk):
        rows = slice(start, start + chunk)
        counted_C1 = (labels[rows] != IGNORED)[:, None]
        x_CD = torch.where(counted_C1, x_PD[rows], 0)
        wanted_Cv = _log_softmax(torch.where(counted_C1, rows_PD[rows], 0), theirs, t, ranks)
        found_Cv = _log_softmax(x_CD, head, t, ranks)
        p_Cv = wanted_Cv.exp()
        total += torch.where(counted_C1, wanted_Cv.sub_(found_Cv).mul_(p_Cv), 0).sum()
        weight_C1 = counted_C1.to(p_Cv.dtype).mul_(scale).mul_(t)
        dlogits_Cv = found_Cv.exp_().sub_(p_Cv).mul_(weight_C1).to(head.value.dtype)
        dx_PD[rows] = dlogits_Cv @ head.value
        accumulate_head(head, dlogits_Cv, x_CD)
        del wanted_Cv, found_Cv, p_Cv, dlogits_Cv  # or the next chunk's were made beside them
    # A share of the vocabulary has a share of the sum.
    return total * t**2, reduce_scatter(dx_PD, ranks)


def _log_softmax(x_CD: Tensor, head: Operand, t: float, ranks: Group) -> Tensor:
    """Return log-probabilities [C, v] of this rank's share of the vocabulary."""
    logits_Cv = x_CD @ head.value.t()
    logits_Cv = logits_Cv.to(torch.promote_types(logits_Cv.dtype, torch.float32)).div_(t)
    logits_Cv.sub_(max_(logits_Cv.amax(1, keepdim=True), ranks))
    return logits_Cv.sub_(sum_(logits_Cv.exp().sum(1, keepdim=True), ranks).log_())
