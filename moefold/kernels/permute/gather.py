"""Permute and unpermute: token rows to their copies, and sums of copies by token.

Both gather, without atomics, so they are deterministic. On a GPU each is one kernel.

T token rows, K copies per token, R = T * K copy rows, D width. ``token_R`` is the token of each
copy row, ``row_TK`` the copy row of a token's k-th copy. An index of T or R, one past the end,
means "none". Each of the two functions is the gradient of the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.fused import uses_triton
from moefold.kernels.permute import fused as kernels
from moefold.kernels.rows import upcast_dtype

RowMap = Callable[[Tensor, Tensor, bool], Tensor]


def permute_rows(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, complete: bool = False) -> Tensor:
    """Return ``x_RD`` with ``x_RD[r] = x_TD[token_R[r]]``; rows without a token are unspecified.

    ``complete``: the caller guarantees that no entry of either index is "none".
    """
    return _PermuteRows.apply(x_TD, _take, token_R, _sum, row_TK, complete)


def unpermute_rows(y_RD: Tensor, token_R: Tensor, row_TK: Tensor, complete: bool = False) -> Tensor:
    """Return ``out_TD`` with ``out[t] = sum_k y_RD[row_TK[t, k]]``, summed in fp32 or wider.

    A missing copy counts as zero; ``complete`` is as in :func:`permute_rows`.
    """
    return _PermuteRows.apply(y_RD, _sum, row_TK, _take, token_R, complete)


def permute_values(
    values_TK: Tensor, copy_R: Tensor, row_TK: Tensor, complete: bool = False
) -> Tensor:
    """Return ``p_R`` with ``p[r] = values.flat[copy_R[r]]``: :func:`permute_rows` of scalars.

    An entry whose ``row_TK`` is "none" gets a zero gradient.
    """
    return permute_rows(values_TK.reshape(-1, 1), copy_R, row_TK.reshape(-1, 1), complete).view(-1)


def _take(x_TD: Tensor, token_R: Tensor, complete: bool) -> Tensor:
    if uses_triton(x_TD):
        return kernels.take(x_TD, token_R)
    if not complete:
        token_R = token_R.clamp(max=x_TD.shape[0] - 1)
    return _index_rows(x_TD, token_R)


def _index_rows(values_NX: Tensor, index: Tensor) -> Tensor:
    """Return the rows at ``index``; zeros if there are no rows."""
    if values_NX.shape[0] == 0:
        return values_NX.new_zeros(index.shape[0], *values_NX.shape[1:])
    return values_NX.index_select(0, index)


def _sum(y_RD: Tensor, row_TK: Tensor, complete: bool) -> Tensor:
    if uses_triton(y_RD):
        return kernels.add(y_RD, row_TK)
    if complete:
        picked = _index_rows(y_RD, row_TK.reshape(-1))
    else:
        end = y_RD.shape[0]
        picked = _index_rows(y_RD, row_TK.reshape(-1).clamp(max=end - 1))
        # Selected, not multiplied by zero, as a missing row may contain anything, such as NaN.
        picked = torch.where((row_TK < end).reshape(-1, 1), picked, 0)
    if row_TK.shape[1] == 1:
        return picked
    picked_TKD = picked.view(*row_TK.shape, y_RD.shape[1])
    if picked.device.type != "cpu":
        return picked_TKD.sum(1)
    # On a CPU a sum over a dim this short takes up to four times as long as additions.
    sum_TD = picked_TKD[:, 0].to(upcast_dtype(y_RD), copy=True)
    for k in range(1, row_TK.shape[1]):
        sum_TD.add_(picked_TKD[:, k])
    return sum_TD.to(y_RD.dtype)


class _PermuteRows(Function):
    """Applies one of the two functions; its gradient is the other."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        function: RowMap,
        index: Tensor,
        gradient: RowMap,
        gradient_index: Tensor,
        complete: bool,
    ) -> Tensor:
        ctx.gradient = gradient
        ctx.complete = complete
        ctx.save_for_backward(gradient_index)
        return function(rows_ND, index, complete)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(grad_MD, *ctx.saved_tensors, ctx.complete), *(None,) * 5
