"""Head and cross-entropy where tensor ranks share the vocabulary.

T rows here, P rows of the tensor group, C rows of a chunk, D hidden, V vocabulary, v of it here.

Each rank computes the logits of its share; the row's maximum, its normaliser and its label's logit
are all that ranks exchange, so that the logits never exist as a whole. Own kernels exchange a
share's log-sum-exp in place of maximum and normaliser.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, gather, max_, reduce_scatter, sum_
from moefold.comm.group import Group
from moefold.data.batch import IGNORED
from moefold.kernels.cross_entropy import chunked
from moefold.kernels.gradients import accumulate
from moefold.kernels.linear.product import weight_gradient
from moefold.kernels.operand import AdapterOperand, Operand
from moefold.layers.flow import Flow


@torch.no_grad()
def loss_and_gradients(
    x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the summed loss (unscaled), and ``scale * d loss / d x_TD``.

    The head's gradient, times ``scale``, is added to the master's ``.grad``.

    Args:
        x_TD: normed rows of this rank.
        head: the head's matrix [V, D], this rank's share of its rows.
        flow: the pass.
        scale: factor on the gradients, of all rows or [P] of each of the tensor group's.
        chunk: rows whose logits exist at once.
    """
    product = partial(_loss_and_gradients, flow=flow, scale=scale, chunk=chunk)
    return widening(product, x_TD, head, flow.n_valid)


def widening(
    product: Callable[[Tensor, Operand], tuple[Tensor, Tensor]],
    x_TD: Tensor,
    head: Operand,
    n_valid: int | None,
) -> tuple[Tensor, Tensor]:
    """Return a loss and its gradient by the rows, of a head with its adapter if it has one."""
    if head.low_rank is None:
        return product(x_TD, head)
    total, dwide_TD = product(*widened(x_TD, head))
    return total, _narrowed(dwide_TD, x_TD, head.low_rank, n_valid)


def widened(x_TD: Tensor, head: Operand) -> tuple[Tensor, Operand]:
    """Return rows and head side by side with those of the head's adapter: one product of both."""
    low = head.low_rank
    assert low is not None
    inner_TR = (low.dropped(x_TD) @ low.a.value.t()).mul_(low.scale)
    value = torch.cat([head.value, low.b.value], 1)
    return torch.cat([x_TD, inner_TR], 1), replace(head, value=value)


def _narrowed(dwide_TD: Tensor, x_TD: Tensor, low: AdapterOperand, n_valid: int | None) -> Tensor:
    """Return the gradient of the rows, and add that of A."""
    dx_TD, dinner_TR = dwide_TD.split([x_TD.shape[1], low.a.value.shape[0]], 1)
    dinner_TR = dinner_TR * low.scale
    rows_TD = low.dropped(x_TD)
    accumulate(low.a.master, partial(weight_gradient, dinner_TR[:n_valid], rows_TD[:n_valid]))
    return dx_TD + low.dropped(dinner_TR @ low.a.value)


def _loss_and_gradients(
    x_TD: Tensor, head: Operand, flow: Flow, scale: float | Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    labels = flow.whole.rows.labels_T
    ranks = flow.world.group("tp")
    if ranks.size == 1:
        return chunked.loss_and_gradients(x_TD, head, labels, scale=scale, chunk=chunk)
    x_PD = all_gather(x_TD, ranks)
    if chunked.goes_through_kernels(x_PD, head):
        first, combine = ranks.index * head.value.shape[0], partial(_combined, ranks=ranks)
        total, dx_PD = chunked.through_kernels(
            x_PD, head, labels, scale=scale, chunk=chunk, first=first, combine=combine
        )
    else:
        total, dx_PD = _plain(x_PD, head, labels, ranks, scale, chunk)
    # Every tensor rank computed the same loss: one of them states it.
    return total if ranks.index == 0 else torch.zeros_like(total), reduce_scatter(dx_PD, ranks)


def _combined(stats_2C: Tensor, ranks: Group) -> Tensor:
    """Return log-sum-exp and label's logit [2, C] of rows from those of each share."""
    normaliser_RC, picked_RC = gather(stats_2C, ranks).unbind(1)
    return torch.stack([normaliser_RC.logsumexp(0), picked_RC.sum(0)])


def _plain(
    x_PD: Tensor,
    head: Operand,
    labels: Tensor,
    ranks: Group,
    scale: float | Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and this share's part of the gradient of ``x_PD``."""
    total, dx_PD = _zero(x_PD), torch.zeros_like(x_PD)
    for start in range(0, x_PD.shape[0], chunk):
        rows = slice(start, start + chunk)
        counted_C = labels[rows] != IGNORED
        x_CD = torch.where(counted_C[:, None], x_PD[rows], 0)
        loss, logp_Cv, mine_C, label_C1 = _log_softmax(x_CD, head, labels[rows], ranks)
        total += torch.where(counted_C, loss, 0).sum()
        weight_C1 = counted_C.to(logp_Cv.dtype).mul_(chunked.scale_of(scale, rows))[:, None]
        dlogits_Cv = logp_Cv.exp_().mul_(weight_C1)
        dlogits_Cv.scatter_add_(1, label_C1, -weight_C1 * mine_C[:, None])
        dlogits_Cv = dlogits_Cv.to(head.value.dtype)
        dx_PD[rows] = dlogits_Cv @ head.value
        chunked.accumulate_head(head, dlogits_Cv, x_CD)
        del logp_Cv, dlogits_Cv  # or the next chunk's logits were made beside them
    return total, dx_PD


@torch.no_grad()
def summed_loss(x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
    """Return this rank's share of the summed cross-entropy, without gradients."""
    total = label_losses(x_TD, head, flow, chunk=chunk).sum()
    return total if flow.world.group("tp").index == 0 else torch.zeros_like(total)


@torch.no_grad()
def label_losses(x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
    """Return the cross-entropy [P] of the tensor group's rows, on each of its ranks.

    It is 0 where a row has no label.
    """
    if head.low_rank is not None:
        x_TD, head = widened(x_TD, head)
    labels, ranks = flow.whole.rows.labels_T, flow.world.group("tp")
    x_PD = all_gather(x_TD, ranks)
    losses_P = x_PD.new_zeros(x_PD.shape[0], dtype=torch.promote_types(x_PD.dtype, torch.float32))
    for start in range(0, x_PD.shape[0], chunk):
        rows = slice(start, start + chunk)
        loss, *_ = _log_softmax(x_PD[rows], head, labels[rows], ranks)
        losses_P[rows] = torch.where(labels[rows] != IGNORED, loss, 0)
    return losses_P


def _log_softmax(
    x_CD: Tensor, head: Operand, labels_C: Tensor, ranks: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss [C], log-probabilities [C, v] of this rank's share of the vocabulary,
    whether a row's label is in it, and where [C, 1]."""
    logits_Cv = x_CD @ head.value.t()
    logits_Cv = logits_Cv.to(torch.promote_types(logits_Cv.dtype, torch.float32))
    most_C1 = max_(logits_Cv.amax(1, keepdim=True), ranks)
    logits_Cv.sub_(most_C1)
    here = logits_Cv.shape[1]
    label_C = labels_C - ranks.index * here
    mine_C = (label_C >= 0) & (label_C < here)
    label_C1 = torch.where(mine_C, label_C, 0)[:, None]
    picked_C = torch.where(mine_C, logits_Cv.gather(1, label_C1)[:, 0], 0)
    both_2C = sum_(torch.stack([logits_Cv.exp().sum(1), picked_C]), ranks)
    normaliser_C = both_2C[0].log()
    return normaliser_C - both_2C[1], logits_Cv.sub_(normaliser_C[:, None]), mine_C, label_C1


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
