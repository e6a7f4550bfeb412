"""Permute, grouped products and combine beside a reference that goes through rows in pieces.

Made to run where rows * columns exceeds what 31 bits count (``tests/gpu``); at a small size the
same checks run anywhere. The reference never forms the place of an element beyond one piece.

T tokens, K copies, R rows = T * K, D hidden, F width, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.kernels.grouped.choose import GroupedKernel
from moefold.kernels.permute.gather import unpermute_rows
from moefold.moe.dispatch.base import Dispatched, Dispatcher
from moefold.moe.dispatch.config import LocalExperts


@dataclass(frozen=True)
class Size:
    """Sizes of one check."""

    tokens: int
    copies: int
    hidden: int
    width: int
    experts: int
    device: str
    piece: int = 8192
    """Rows of one piece of the reference."""


def drawn(size: Size, *shape: int) -> Tensor:
    """Return bf16 values of about 1."""
    return torch.empty(shape, dtype=torch.bfloat16, device=size.device).normal_()


def routed(size: Size) -> Tensor:
    """Return experts [T, K], different ones for a token; one copy in 64 goes to none."""
    first_T = torch.randint(size.experts, (size.tokens,), device=size.device)
    step_K = torch.arange(size.copies, device=size.device)
    experts_TK = (first_T[:, None] + step_K) % size.experts
    missing_TK = torch.rand(experts_TK.shape, device=size.device) < 1 / 64
    return torch.where(missing_TK, size.experts, experts_TK)


def pieces(size: Size, rows: int) -> Iterator[slice]:
    """Yield pieces of ``rows`` rows in order."""
    for start in range(0, rows, size.piece):
        yield slice(start, min(start + size.piece, rows))


def spans(size: Size, offs_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the pieces of each expert's rows."""
    ends = [0, *offs_E.tolist()]
    for e in range(size.experts):
        for start in range(ends[e], ends[e + 1], size.piece):
            yield e, slice(start, min(start + size.piece, ends[e + 1]))


def check_dispatch(size: Size, x_TD: Tensor, experts_TK: Tensor) -> Dispatched:
    """Dispatch rows and look at each of them: where it comes from and whose it is."""
    weights_TK = torch.rand(experts_TK.shape, device=size.device)
    dispatcher = Dispatcher(LocalExperts(), size.experts)
    sent = dispatcher.dispatch(x_TD, weights_TK, experts_TK, False)
    token_R, row_TK = sent.handle
    live = int(sent.offs_E[-1])
    assert live == int((experts_TK < size.experts).sum())
    assert token_R.dtype == row_TK.dtype == torch.int64 and sent.offs_E.dtype == torch.int32
    for rows in pieces(size, live):
        assert torch.equal(sent.x_RD[rows], x_TD[token_R[rows]])
    for e, rows in spans(size, sent.offs_E):
        tokens_R = token_R[rows]
        column_R = (experts_TK[tokens_R] == e).int().argmax(1)
        assert bool((experts_TK[tokens_R, column_R] == e).all())
        places_R = torch.arange(rows.start, rows.stop, device=size.device)
        assert torch.equal(row_TK[tokens_R, column_R], places_R)
        assert torch.equal(sent.probs_R[rows], weights_TK[tokens_R, column_R])
    assert torch.equal(row_TK == token_R.shape[0], experts_TK == size.experts)
    return sent


def check_combine(size: Size, y_RD: Tensor, sent: Dispatched) -> None:
    """Combine rows, and go back: against sums and copies made piece by piece."""
    token_R, row_TK = sent.handle
    live = int(sent.offs_E[-1])
    y_RD = y_RD.requires_grad_()
    out_TD = unpermute_rows(y_RD, token_R, row_TK, False)
    want_TD = torch.zeros(size.tokens, size.hidden, device=size.device)
    for rows in pieces(size, live):
        want_TD.index_add_(0, token_R[rows], y_RD.detach()[rows].float())
    # Two numbers have the same sum in either order, so that not a bit may differ.
    for rows in pieces(size, size.tokens):
        assert torch.equal(out_TD[rows], want_TD[rows].to(out_TD.dtype))
    dout_TD = drawn(size, size.tokens, size.hidden)
    (dy_RD,) = torch.autograd.grad(out_TD, y_RD, dout_TD)
    for rows in pieces(size, live):
        assert torch.equal(dy_RD[rows], dout_TD[token_R[rows]])


def check_products(size: Size, kernel: GroupedKernel, x_RD: Tensor, offs_E: Tensor) -> Tensor:
    """Multiply rows by experts in both widths and directions; returns rows as wide as ``x_RD``."""
    w_EFD = drawn(size, size.experts, size.width, size.hidden) * size.hidden**-0.5
    w_EDF = drawn(size, size.experts, size.hidden, size.width) * size.width**-0.5
    h_RF = kernel.product(x_RD, w_EFD, offs_E)
    y_RD = kernel.product(h_RF, w_EDF, offs_E)
    dh_RF = kernel.input_gradient(y_RD, w_EDF, offs_E)
    dx_RD = kernel.input_gradient(h_RF, w_EFD, offs_E)
    dw_EDF = kernel.weight_gradient(y_RD, h_RF, offs_E, None)
    want_EDF = torch.zeros(w_EDF.shape, device=size.device)
    for e, rows in spans(size, offs_E):
        x, h, y = x_RD[rows].float(), h_RF[rows].float(), y_RD[rows].float()
        close(h, x @ w_EFD[e].float().t())
        close(y, h @ w_EDF[e].float().t())
        close(dh_RF[rows].float(), y @ w_EDF[e].float())
        close(dx_RD[rows].float(), h @ w_EFD[e].float())
        want_EDF[e] += y.t() @ h
    for e in range(size.experts):
        close(dw_EDF[e].float(), want_EDF[e])
    return y_RD


def close(ours: Tensor, theirs: Tensor) -> None:
    """Assert that no row of a bf16 result is off by more than its rounding allows."""
    error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-3)
    assert float(error.max()) < 2 * torch.finfo(torch.bfloat16).eps


def check(size: Size, kernel: GroupedKernel) -> None:
    """Run the three checks one after another, on rows that the first one dispatched."""
    torch.manual_seed(0)
    sent = check_dispatch(size, drawn(size, size.tokens, size.hidden), routed(size))
    y_RD = check_products(size, kernel, sent.x_RD, sent.offs_E)
    check_combine(size, y_RD, sent)
