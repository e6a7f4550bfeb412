"""Gather of token rows to their copies, and gather-and-sum back. No atomics: deterministic.

On a GPU each is one kernel.

T token rows, K copies per token, R = T * K copy rows, D width. ``token_R`` is the token of each
copy row, ``row_TK`` the copy row of a token's k-th copy. A value of T or R (one past the end) means
"none". Each of the two functions is the other's gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import fused
from moefold.kernels.permute import fused as kernels
from moefold.kernels.rows import wide_dtype

Move = Callable[[Tensor, Tensor, bool], Tensor]


def spread(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, complete: bool = False) -> Tensor:
    """Return ``x_RD`` with ``x_RD[r] = x_TD[token_R[r]]``; rows without a token are unspecified.

    ``complete``: the caller guarantees that no entry of either index is "none".
    """
    return _Moved.apply(x_TD, _take, token_R, _sum, row_TK, complete)


def collect(y_RD: Tensor, token_R: Tensor, row_TK: Tensor, complete: bool = False) -> Tensor:
    """Return ``out_TD`` with ``out[t] = sum_k y_RD[row_TK[t, k]]``, summed in fp32 or wider.

    A missing copy counts as zero; ``complete`` is that of :func:`spread`.
    """
    return _Moved.apply(y_RD, _sum, row_TK, _take, token_R, complete)


def pick(values_TK: Tensor, copy_R: Tensor, row_TK: Tensor, complete: bool = False) -> Tensor:
    """Return ``p_R`` with ``p[r] = values.flat[copy_R[r]]``: :func:`spread` of single values.

    An entry whose ``row_TK`` is "none" gets a zero gradient.
    """
    return spread(values_TK.reshape(-1, 1), copy_R, row_TK.reshape(-1, 1), complete).view(-1)


def _take(x_TD: Tensor, token_R: Tensor, complete: bool) -> Tensor:
    if fused(x_TD):
        return kernels.take(x_TD, token_R)
    if not complete:
        token_R = token_R.clamp(max=x_TD.shape[0] - 1)
    return _rows(x_TD, token_R)


def _rows(values_NX: Tensor, index: Tensor) -> Tensor:
    """Return the rows at ``index``; zeros if there are no rows."""
    if values_NX.shape[0] == 0:
        return values_NX.new_zeros(index.shape[0], *values_NX.shape[1:])
    return values_NX.index_select(0, index)


def _sum(y_RD: Tensor, row_TK: Tensor, complete: bool) -> Tensor:
    if fused(y_RD):
        return kernels.add(y_RD, row_TK)
    if complete:
        picked = _rows(y_RD, row_TK.reshape(-1))
    else:
        last = y_RD.shape[0]
        picked = _rows(y_RD, row_TK.reshape(-1).clamp(max=last - 1))
        # Selected, not multiplied by zero, as a missing row may hold anything, such as NaN.
        picked = torch.where((row_TK < last).reshape(-1, 1), picked, 0)
    if row_TK.shape[1] == 1:
        return picked
    picked_TKD = picked.view(*row_TK.shape, y_RD.shape[1])
    if picked.device.type != "cpu":
        return picked_TKD.sum(1)
    # On a CPU a sum over a dim this short takes up to four times as long as additions.
    sum_TD = picked_TKD[:, 0].to(wide_dtype(y_RD), copy=True)
    for k in range(1, row_TK.shape[1]):
        sum_TD.add_(picked_TKD[:, k])
    return sum_TD.to(y_RD.dtype)


class _Moved(Function):
    """Apply one of the two functions; its gradient is the other."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        move: Move,
        index: Tensor,
        back: Move,
        index_back: Tensor,
        complete: bool,
    ) -> Tensor:
        ctx.back, ctx.complete = back, complete
        ctx.save_for_backward(index_back)
        return move(rows_ND, index, complete)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad_MD, *ctx.saved_tensors, ctx.complete), *(None,) * 5
