"""Kernels that bring rows to their copies and back: to the bit, whatever nobody owns."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.permute import fused
from moefold.kernels.permute.gather import permute_rows, permute_values, unpermute_rows
from moefold.moe.dispatch.routing_plan import Permutation, sort_copies
from tests.triton.values import DEVICE, DTYPES, bits, watched
from tests.triton.watch import MemoryFault, Watch

SHAPES = ((37, 3, 80), (9, 2, 1), (3, 1, 2100), (5, 8, 64), (0, 2, 16))


def sorted_copies(tokens: int, top_k: int, drop: bool = True) -> Permutation:
    """Return copies sorted over eight experts; some of a few tokens go nowhere."""
    g = torch.Generator().manual_seed(tokens)
    experts_TK = torch.rand(tokens, 8, generator=g).argsort(1)[:, :top_k]
    if drop and tokens > 4:
        experts_TK[1], experts_TK[3, 0] = 8, 8
    with force_triton(False):
        return sort_copies(experts_TK, 8)


def drawn(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return values of about 1."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_sums_are_those_of_a_loop(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, top_k, width = shape
    order, x_TD = sorted_copies(tokens, top_k), drawn(tokens, width, dtype)
    x_RD = watched(lambda: fused.take(x_TD, order.token_R), whole=False, waste=None)
    live_R = order.token_R < tokens
    assert torch.equal(x_RD[live_R], x_TD[order.token_R[live_R]])
    x_RD[~live_R] = torch.nan
    want_TD = torch.zeros(tokens, width)
    for t, rows in enumerate(order.row_TK.tolist()):
        for row in rows:
            want_TD[t] += x_RD[row].float() if row < len(x_RD) else 0
    got_TD = watched(lambda: fused.add(x_RD, order.row_TK))
    assert torch.equal(got_TD, want_TD.to(dtype))


def taken(x_TD: Tensor, token_R: Tensor, into_RD: Tensor) -> Tensor:
    """Run the kernel on results that hold something already."""
    there = [x.to(DEVICE or "cpu") for x in (x_TD, token_R, into_RD)]
    fused._take[(1, 1)](*there, 18, 9, 5, 32, 8)
    return there[-1].cpu()


def test_rows_that_nobody_owns_are_not_read_and_not_written() -> None:
    order = sorted_copies(9, 2)
    x_TD = drawn(9, 5, torch.bfloat16)
    x_TD[1] = torch.nan
    with force_triton(True):
        gone_R = order.token_R == 9
        x_RD = torch.full((18, 5), 7, dtype=torch.bfloat16)
        x_RD = taken(x_TD, order.token_R, x_RD)
    assert gone_R.sum() == 3 and bool((x_RD[gone_R] == 7).all())
    x_RD[gone_R] = torch.nan
    assert bool(watched(lambda: fused.add(x_RD, order.row_TK)).isfinite().all())


def test_a_lone_negative_zero_keeps_its_sign() -> None:
    row_T1 = torch.arange(4)[:, None]
    y_RD = torch.full((4, 8), -0.0)
    assert torch.equal(bits(watched(lambda: fused.add(y_RD, row_T1))), bits(y_RD))


@pytest.mark.parametrize("complete", (True, False), ids=("complete", "some dropped"))
def test_gradients_are_those_of_the_plain_way(complete: bool) -> None:
    order = sorted_copies(13, 2, drop=not complete)
    x_TD, w_TK = drawn(13, 24, torch.float32), drawn(13, 2, torch.float32)
    dy_RD, dp_R = drawn(26, 24, torch.float32), drawn(26, 1, torch.float32)[:, 0]
    dy_RD[order.token_R == 13], dp_R[order.token_R == 13] = torch.nan, torch.nan

    def gradients() -> tuple[Tensor, ...]:
        x, w, y = (v.clone().requires_grad_() for v in (x_TD, w_TK, dy_RD))
        index = (order.token_R, order.row_TK, complete)
        rows, entries = permute_rows(x, *index), permute_values(w, order.copy_R, *index[1:])
        torch.autograd.backward([rows, entries], [dy_RD, dp_R])
        out_TD = unpermute_rows(y, *index)
        out_TD.backward(x_TD)
        assert x.grad is not None and w.grad is not None and y.grad is not None
        return x.grad, w.grad, y.grad[order.token_R < 13], out_TD.detach()

    with force_triton(False):
        plain = gradients()
    for got, want in zip(watched(gradients, whole=False, waste=None), plain, strict=True):
        assert torch.equal(got, want)


def test_places_of_elements_are_counted_in_64_bits() -> None:
    """A row of 2**20 columns far behind the tensor: the checker says where it was looked for."""
    x_TD, token_N = torch.zeros(4, 8), torch.tensor([3000])
    out_ND, wide = torch.zeros(1, 2048), 2**20
    with force_triton(True), Watch(), pytest.raises(MemoryFault, match=r"element 3\d{9}$"):
        fused._take[(1, 1)](x_TD, token_N, out_ND, 1, 4000, wide, 1, 2048)
    with force_triton(True), Watch(), pytest.raises(MemoryFault, match=r"element 3\d{9}$"):
        fused._add[(1, 1)](x_TD, token_N[:, None], out_ND, 1, 4000, wide, 1, 1, 2048)


def test_torch_knows_the_operations() -> None:
    order, x_TD = sorted_copies(9, 2), drawn(9, 8, torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused.take.overload, (x_TD, torch.arange(9)), test_utils=checks)
    torch.library.opcheck(fused.add.overload, (drawn(18, 8, torch.float32), order.row_TK))
