"""Output head and cross-entropy in chunks of rows, without storing all logits.

T rows, C rows of a chunk, D hidden, V vocabulary. Two functions have equal arithmetic:

``loss_and_gradients`` is for training. The loss ends the forward pass and its scale is known, so
that one pass over the chunks computes the loss, the gradient of ``x`` and the head's gradient,
which is added to ``.grad`` in place: three products.

``cross_entropy_sum`` is an ordinary differentiable function; its backward recomputes the logits:
four products.

Rows without a label enter each product as zeros (selected, not multiplied), as padding may contain
anything. On a GPU statistics and the logits' gradient are two kernels, and the gradient overwrites
the logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.cross_entropy import fused as kernels
from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.gradients import accumulate
from moefold.kernels.linear.product import accumulates_in_fp32, weight_gradient
from moefold.kernels.operand import Operand
from moefold.kernels.rows import row_chunks, upcast, upcast_dtype

TILE = {"cpu": 1 << 22}
DEVICE_TILE = 1 << 27
"""Elements of a tile of the head's gradient, the largest temporary of that product: a few megabytes
on a CPU; elsewhere a quarter of a gigabyte, for few launches."""
IGNORE_INDEX = -100
"""Label of rows without a label, as in torch."""
Combine = Callable[[Tensor], Tensor]
"""Reduces the statistics [2, C] of vocabulary shards to those of the whole vocabulary."""


@torch.no_grad()
def loss_and_gradients(
    x_TD: Tensor,
    head: Operand,
    labels_T: Tensor,
    *,
    scale: float | Tensor,
    chunk: int,
    vocab_start: int = 0,
    combine: Combine | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss (fp32 or wider, unscaled) and ``scale * d loss / d x_TD``.

    The head's gradient, times ``scale``, is added to the master's ``.grad``. ``scale`` may be one
    number per row, [T]. The head may be a vocabulary shard that begins at ``vocab_start``: then
    ``combine`` reduces the statistics of all shards, and the gradient of ``x`` is a partial sum.
    """
    value = head.value
    labelled_T = labels_T != IGNORE_INDEX
    x_TD = torch.where(labelled_T[:, None], x_TD, 0)
    weight_T = labelled_T.to(upcast_dtype(x_TD)).mul_(scale)
    dx_TD = torch.empty_like(x_TD)
    stats = [weight_T.new_zeros(2, 0)]
    # One buffer for all chunks, as the system maps each large buffer page by page.
    buffer_CV = x_TD.new_empty(min(chunk, x_TD.shape[0]), value.shape[0])
    for rows in _chunks(x_TD.shape[0], chunk):
        x_CD = x_TD[rows]
        labels_C = labels_T[rows]
        logits_CV = torch.mm(x_CD, value.t(), out=buffer_CV[: x_CD.shape[0]])
        stats.append(
            _logits_to_gradients(logits_CV, labels_C, weight_T[rows], vocab_start, combine)
        )
        torch.mm(logits_CV, value, out=dx_TD[rows])
        accumulate_head_gradient(head, logits_CV, x_CD)
    normaliser_T, picked_T = torch.cat(stats, 1)
    return torch.where(labelled_T, normaliser_T - picked_T, 0).sum(), dx_TD


def cross_entropy_sum(x_TD: Tensor, head: Operand, labels_T: Tensor, *, chunk: int) -> Tensor:
    """Return the summed cross-entropy, differentiable in ``x_TD`` and in a head without adapter."""
    return _CrossEntropy.apply(x_TD, head.master, head.value, labels_T, chunk)


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def statistics(
    logits_CV: Tensor, labels_C: Tensor, vocab_start: int = 0, combine: Combine | None = None
) -> Tensor:
    """Return [2, C]: each row's log-sum-exp, and its label's logit, 0 if outside this shard."""
    compute = kernels.statistics if uses_triton(logits_CV) else _statistics_and_gradients
    stats_2C = compute(logits_CV, labels_C, vocab_start)
    return stats_2C if combine is None else combine(stats_2C)


def _logits_to_gradients(
    logits_CV: Tensor,
    labels_C: Tensor,
    weight_C: Tensor,
    vocab_start: int,
    combine: Combine | None,
) -> Tensor:
    """Replace logits by ``(softmax - label) * weight`` in place; return their statistics."""
    if combine is None and not uses_triton(logits_CV):
        return _statistics_and_gradients(logits_CV, labels_C, vocab_start, weight_C)
    stats_2C = statistics(logits_CV, labels_C, vocab_start, combine)
    if uses_triton(logits_CV):
        kernels.gradient(logits_CV, labels_C, stats_2C[0], weight_C, vocab_start)
    else:
        _statistics_and_gradients(logits_CV, labels_C, vocab_start, weight_C, stats_2C[0])
    return stats_2C


def _statistics_and_gradients(
    logits_CV: Tensor,
    labels_C: Tensor,
    vocab_start: int,
    weight_C: Tensor | None = None,
    normaliser_C: Tensor | None = None,
) -> Tensor:
    """Return statistics; with weights also replace logits by gradients.

    Gradients use ``normaliser_C`` if given. Each chunk is upcast, as a CPU is slower in 16 bits.
    """
    label_C1 = labels_C[:, None] - vocab_start
    local_C1 = (label_C1 >= 0) & (label_C1 < logits_CV.shape[1])
    label_C1 = torch.where(local_C1, label_C1, 0)
    stats_2C = logits_CV.new_empty(2, len(labels_C), dtype=upcast_dtype(logits_CV))
    for rows in row_chunks(logits_CV):
        wide_cV = upcast(logits_CV[rows])
        picked_c1 = wide_cV.gather(1, label_C1[rows])
        stats_2C[1, rows] = torch.where(local_C1[rows], picked_c1, 0)[:, 0]
        max_c = wide_cV.amax(1)
        scratch = weight_C is not None or wide_cV.dtype != logits_CV.dtype
        probs_cV = torch.sub(wide_cV, max_c[:, None], out=wide_cV if scratch else None).exp_()
        sum_c = probs_cV.sum(1)
        torch.add(max_c, sum_c.log(), out=stats_2C[0, rows])
        if weight_C is None:
            continue
        weight_c = weight_C[rows]
        factor_c = weight_c / sum_c
        if normaliser_C is not None:
            factor_c = weight_c * (max_c - normaliser_C[rows]).exp_()
        probs_cV.mul_(factor_c[:, None])
        probs_cV.scatter_add_(1, label_C1[rows], weight_c[:, None].neg().mul_(local_C1[rows]))
        if probs_cV.dtype != logits_CV.dtype:
            logits_CV[rows] = probs_cV
    return stats_2C


def accumulate_head_gradient(head: Operand, dlogits_CV: Tensor, x_CD: Tensor) -> None:
    """Add a chunk's gradient to that of the head, and of adapter B, whose inputs end ``x_CD``."""
    if head.master.requires_grad:
        accumulate(head.master, partial(head_gradient, dlogits_CV, x_CD))
    if head.low_rank is not None:
        last = x_CD[:, -head.low_rank.b.value.shape[1] :]
        accumulate(head.low_rank.b.master, partial(head_gradient, dlogits_CV, last))


def head_gradient(dlogits_CV: Tensor, x_CD: Tensor, into_VD: Tensor | None) -> Tensor:
    """Add a chunk's ``dlogits^T x`` to ``into_VD``, tile by tile of the vocabulary."""
    vocab = dlogits_CV.shape[1]
    hidden = x_CD.shape[1]
    if into_VD is None:
        into_VD = x_CD.new_zeros(vocab, hidden, dtype=upcast_dtype(x_CD))
    tile = max(1, TILE.get(x_CD.device.type, DEVICE_TILE) // hidden)
    if x_CD.dtype.itemsize == 2 and accumulates_in_fp32(x_CD.device.type):
        tile = vocab  # the product adds in place, and takes twice as long on slices of columns
    for start in range(0, vocab, tile):
        rows = slice(start, start + tile)
        weight_gradient(dlogits_CV[:, rows], x_CD, into_VD[rows])
    return into_VD


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, master: Tensor, value_VD: Tensor, labels_T: Tensor, chunk: int
    ) -> Tensor:
        ctx.save_for_backward(x_TD, value_VD, labels_T)
        ctx.chunk = chunk
        ctx.master = master
        total = x_TD.new_zeros((), dtype=upcast_dtype(x_TD))
        for rows in _chunks(x_TD.shape[0], chunk):
            normaliser_C, picked_C = statistics(x_TD[rows] @ value_VD.t(), labels_T[rows])
            total += torch.where(labels_T[rows] != IGNORE_INDEX, normaliser_C - picked_C, 0).sum()
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, value_VD, labels_T = ctx.saved_tensors
        leaf_VD = ctx.master.detach().requires_grad_(ctx.needs_input_grad[1])
        leaf_VD.grad = torch.zeros_like(leaf_VD) if leaf_VD.requires_grad else None
        kwargs = {"scale": dloss, "chunk": ctx.chunk}
        _, dx_TD = loss_and_gradients(x_TD, Operand(leaf_VD, value_VD), labels_T, **kwargs)
        return dx_TD, leaf_VD.grad, None, None, None
