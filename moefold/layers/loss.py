"""Head and cross-entropy with the vocabulary cut over tensor ranks.

T local rows, P rows of the tensor group, C rows of a chunk, D hidden, V vocabulary, v of it local.

Each rank computes the logits of its part of the vocabulary. Ranks exchange only each row's
log-sum-exp over their part, and the label's logit if it is in it, never the logits.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, gather, reduce_scatter
from moefold.comm.group import Group
from moefold.data.batch import IGNORE_INDEX
from moefold.kernels.cross_entropy import chunked
from moefold.kernels.gradients import accumulate
from moefold.kernels.linear.product import weight_gradient
from moefold.kernels.operand import Operand
from moefold.kernels.rows import upcast_dtype
from moefold.layers.flow import Flow


@torch.no_grad()
def loss_and_gradients(
    x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the summed loss (unscaled), and ``scale * d loss / d x_TD``.

    The head's gradient, times ``scale``, is added to the master's ``.grad``.

    Args:
        x_TD: normed rows of this rank.
        head: this rank's rows of the head's matrix [V, D].
        flow: the pass.
        scale: factor on the gradients, or a factor [P] for each row of the tensor group.
        chunk: number of rows whose logits exist at once.
    """
    labels = flow.whole.rows.labels_T
    ranks = flow.world.group("tp")
    options: dict[str, Any] = {"scale": scale, "chunk": chunk}
    if ranks.size > 1:
        options |= _vocab_arguments(head, ranks)

    def product(x_TD: Tensor, head: Operand) -> tuple[Tensor, Tensor]:
        total, dx_PD = chunked.loss_and_gradients(all_gather(x_TD, ranks), head, labels, **options)
        if ranks.index:
            # All tensor ranks computed the same loss: only one of them reports it.
            total = torch.zeros_like(total)
        return total, reduce_scatter(dx_PD, ranks)

    return apply_with_adapter(product, x_TD, head, flow.n_valid)


def apply_with_adapter(
    product: Callable[[Tensor, Operand], tuple[Tensor, Tensor]],
    x_TD: Tensor,
    head: Operand,
    n_valid: int | None,
) -> tuple[Tensor, Tensor]:
    """Return a loss and its gradient with respect to rows, for a head with or without an adapter.

    The gradient of the adapter's A is added to its master's ``.grad``.
    """
    if head.low_rank is None:
        return product(x_TD, head)
    low = head.low_rank
    total, dwide_TD = product(*append_adapter(x_TD, head))
    widths = [x_TD.shape[1], low.a.value.shape[0]]
    dx_TD, dinner_TR = dwide_TD.split(widths, 1)
    dinner_TR = dinner_TR * low.scale
    rows_TD = low.apply_dropout(x_TD)
    gradient = partial(weight_gradient, dinner_TR[:n_valid], rows_TD[:n_valid])
    accumulate(low.a.master, gradient)
    return total, dx_TD + low.apply_dropout(dinner_TR @ low.a.value)


def append_adapter(x_TD: Tensor, head: Operand) -> tuple[Tensor, Operand]:
    """Return rows and head, each concatenated with the adapter's, so that one product has both."""
    low = head.low_rank
    assert low is not None
    inner_TR = low.apply_dropout(x_TD) @ low.a.value.t()
    inner_TR.mul_(low.scale)
    value = torch.cat([head.value, low.b.value], 1)
    return torch.cat([x_TD, inner_TR], 1), replace(head, value=value)


def _vocab_arguments(head: Operand, ranks: Group) -> dict[str, Any]:
    """Return arguments of ``chunked``: the rank's first token id, and how to combine statistics."""
    return {
        "vocab_start": head.first_row,
        "combine": partial(_combine_stats, ranks=ranks),
    }


def _combine_stats(stats_2C: Tensor, ranks: Group) -> Tensor:
    """Return log-sum-exp and label logit [2, C] over the vocabulary from those of each rank."""
    normaliser_RC, picked_RC = gather(stats_2C, ranks).unbind(1)
    return torch.stack([normaliser_RC.logsumexp(0), picked_RC.sum(0)])


@torch.no_grad()
def summed_loss(x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
    """Return this rank's part of the summed cross-entropy, without gradients."""
    total = label_losses(x_TD, head, flow, chunk=chunk).sum()
    if flow.world.group("tp").index:
        return torch.zeros_like(total)
    return total


@torch.no_grad()
def label_losses(x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
    """Return the cross-entropy [P] of the tensor group's rows, on each of its ranks.

    Rows without a label have 0.
    """
    if head.low_rank is not None:
        x_TD, head = append_adapter(x_TD, head)
    labels = flow.whole.rows.labels_T
    ranks = flow.world.group("tp")
    x_PD = all_gather(x_TD, ranks)
    share = _vocab_arguments(head, ranks)
    losses_P = x_PD.new_zeros(x_PD.shape[0], dtype=upcast_dtype(x_PD))
    for start in range(0, x_PD.shape[0], chunk):
        rows = slice(start, start + chunk)
        labels_C = labels[rows]
        stats_2C = chunked.statistics(x_PD[rows] @ head.value.t(), labels_C, **share)
        normaliser_C, picked_C = stats_2C
        losses_P[rows] = torch.where(labels_C != IGNORE_INDEX, normaliser_C - picked_C, 0)
    return losses_P
