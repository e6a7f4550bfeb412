"""Gather of rows to copies, and gather-and-sum back, as one Triton kernel each.

Values and indices are those of :mod:`moefold.kernels.permute.gather`, N output rows. Rows without
a token are left uninitialised. Sums over copies are fp32 and in a fixed order: deterministic.
"""

from torch import Tensor

from moefold.kernels.fused import Op, jit, row_grid, tl


@jit
def _take(x, token, out, rows, tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(token + row, mask=row < rows, other=tokens)
    mask = (source < tokens)[:, None] & (column < width)[None, :]
    value = tl.load(x + source[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


@jit
def _add(
    y, row, out, tokens, copies, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        source = tl.load(row + token * K + k, mask=token < tokens, other=copies)
        mask_k = inside & (source < copies)[:, None]
        y_ptrs = y + source[:, None] * width + column[None, :]
        value = tl.load(y_ptrs, mask=mask_k, other=0.0).to(tl.float32)
        # No addition to zero for the first copy, so that a negative zero keeps its sign.
        total = value if k == 0 else total + value
    out_ptrs = out + token[:, None] * width + column[None, :]
    tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=inside)


def take_rows(x_TD: Tensor, token_N: Tensor) -> Tensor:
    """Return ``x_ND`` with ``x[n] = x_TD[token_N[n]]``; rows without a token are unspecified."""
    out_ND = _empty_rows(x_TD, token_N)
    (tokens, width) = x_TD.shape
    rows = token_N.shape[0]
    grid, block = row_grid(rows, width)
    if out_ND.numel():
        _take[grid](x_TD.contiguous(), token_N.contiguous(), out_ND, rows, tokens, width, *block)
    return out_ND


def add_rows(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return ``out_TD`` with ``out[t] = sum_k y_RD[row_TK[t, k]]``; a missing copy adds nothing."""
    out_TD = _empty_rows(y_RD, row_TK)
    (copies, width) = y_RD.shape
    (tokens, top_k) = row_TK.shape
    grid, block = row_grid(tokens, width)
    if out_TD.numel():
        y_RD = y_RD.contiguous()
        row_TK = row_TK.contiguous()
        _add[grid](y_RD, row_TK, out_TD, tokens, copies, width, top_k, *block)
    return out_TD


def _empty_rows(x_NX: Tensor, index: Tensor) -> Tensor:
    return x_NX.new_empty(index.shape[0], x_NX.shape[1])


take = Op(take_rows, _empty_rows)
add = Op(add_rows, _empty_rows)
