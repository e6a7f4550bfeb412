"""Cross-entropy over rows of logits as two Triton kernels; the gradient overwrites the logits.

C rows, V columns of the vocabulary, which may be one rank's shard. Arithmetic is fp32.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import Op, cdiv, jit, next_power_of_2, tl

MAX_COLUMNS = 4096
"""Largest number of columns of a block."""
WARPS = 8


@jit
def _statistics(
    logits, labels, stats,
    rows, width, vocab_start,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * width
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        logit = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logit, 0))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(logit - higher), 0)
        maximum = higher
    label = tl.load(labels + row) - vocab_start
    in_shard = (label >= 0) & (label < width)
    picked = tl.load(row_ptr + label, mask=in_shard, other=0.0).to(tl.float32)
    tl.store(stats + row, maximum + tl.log(total))
    tl.store(stats + rows + row, picked)


@jit
def _gradient(
    logits, labels, normaliser, weight,
    width, vocab_start,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    logit_ptrs = logits + row * width + column
    factor = tl.load(weight + row)
    logit = tl.load(logit_ptrs, mask=inside, other=0.0).to(tl.float32)
    prob = tl.exp(logit - tl.load(normaliser + row))
    label = tl.load(labels + row) - vocab_start
    grad = tl.where(factor == 0, 0.0, (prob - (column == label).to(tl.float32)) * factor)
    tl.store(logit_ptrs, grad.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_statistics(logits_CV: Tensor, labels_C: Tensor, vocab_start: int) -> Tensor:
    """Return fp32 [2, C]: each row's log-sum-exp, and the logit of its label.

    ``vocab_start`` is the vocabulary index of column 0. A label outside the columns has logit 0.
    """
    rows, width = logits_CV.shape
    stats_2C = _empty_statistics(logits_CV, labels_C, vocab_start)
    if rows:
        _statistics[(rows,)](
            logits_CV, labels_C, stats_2C, rows, width, vocab_start,
            min(MAX_COLUMNS, next_power_of_2(width)), num_warps=WARPS,
        )  # fmt: skip
    return stats_2C


def _empty_statistics(logits_CV: Tensor, labels_C: Tensor, first: int) -> Tensor:
    return logits_CV.new_empty(2, logits_CV.shape[0], dtype=torch.float32)


def cross_entropy_gradient(
    logits_CV: Tensor, labels_C: Tensor, normaliser_C: Tensor, weight_C: Tensor, vocab_start: int
) -> None:
    """Replace contiguous logits by ``(softmax - label) * weight``.

    ``normaliser_C`` is the log-sum-exp of the whole row; a row with weight 0 becomes zeros.
    """
    rows, width = logits_CV.shape
    columns = min(MAX_COLUMNS, next_power_of_2(width))
    if rows:
        _gradient[(rows, cdiv(width, columns))](
            logits_CV, labels_C, normaliser_C, weight_C, width, vocab_start, columns,
            num_warps=WARPS,
        )  # fmt: skip


statistics = Op(cross_entropy_statistics, _empty_statistics)
gradient = Op(cross_entropy_gradient, mutates_args=("logits_CV",))
