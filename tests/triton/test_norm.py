"""The kernels of RMSNorm against fp64: alone, after a sum, before a rotation."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.norm import fused, rotated
from moefold.kernels.rope.rotate import rotate
from tests import references
from tests.triton.values import DTYPES, assert_rounded, watched

EPSILON = 1e-5
SHAPES = ((0, 8), (1, 3), (5, 72), (37, 100), (35, 256), (3, 2100))
NAN = float("nan")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g).to(dtype)


def norm(x: Tensor, weight_D: Tensor) -> Tensor:
    """Norm in fp64, differentiable."""
    return references.norm(x, weight_D, EPSILON)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("summed", (True, False), ids=("summed", "alone"))
def test_a_norm_is_that_of_fp64(shape: tuple[int, int], dtype: torch.dtype, summed: bool) -> None:
    rows, width = shape
    x_ND, dy_ND, weight_D = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype), drawn(width)
    x_ND *= 3
    more_ND = drawn(width, rows).t().to(dtype) if summed else None
    y_ND, rstd_N, sum_ND = watched(
        lambda: fused.forward(x_ND, weight_D, EPSILON, more_ND), waste=1.6
    )
    seen = x_ND if more_ND is None else x_ND + more_ND
    assert more_ND is None or torch.equal(sum_ND, seen)
    wide, wide_w = seen.double().requires_grad_(), weight_D.double().requires_grad_()
    want = norm(wide, wide_w)
    assert_rounded(y_ND, want.detach())
    valid = rows - rows // 3
    want.backward(dy_ND.double())
    (dw,) = torch.autograd.grad(norm(wide[:valid], wide_w), wide_w, dy_ND[:valid].double())
    dx_ND, shares = watched(
        lambda: fused.backward(dy_ND, seen, weight_D, rstd_N, valid, more_ND), waste=None
    )
    assert wide.grad is not None
    assert_rounded(dx_ND, wide.grad if more_ND is None else wide.grad + more_ND.double())
    assert_rounded(shares.sum(0), dw)


def test_rows_may_lie_apart_and_padding_may_be_anything() -> None:
    whole, weight_D, dy_ND = drawn(40, 96), drawn(64), drawn(40, 64)
    whole[:, 64:] = NAN
    x_ND = whole[:, :64]
    y_ND, rstd_N, _ = watched(lambda: fused.forward(x_ND, weight_D, EPSILON, None))
    assert_rounded(y_ND, norm(x_ND.double(), weight_D.double()))
    clean = fused.backward(dy_ND, x_ND, weight_D, rstd_N, 30, None)
    dy_ND[30:] = NAN
    dx_ND, shares = watched(
        lambda: fused.backward(dy_ND, x_ND, weight_D, rstd_N, 30, None), waste=None
    )
    assert torch.equal(dx_ND[:30], clean[0][:30]) and torch.equal(shares, clean[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ("half", "interleaved"))
@pytest.mark.parametrize("shape", ((0, 2, 8), (1, 1, 6), (7, 3, 40), (9, 2, 128)), ids=str)
def test_a_normed_and_turned_head_is_that_of_fp64(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype
) -> None:
    tokens, _, dims = shape
    x_THd, dy_THd = drawn(*shape, dtype=dtype) * 3, drawn(*shape, dtype=dtype)
    weight_d, angles = drawn(dims), drawn(tokens, dims // 2) * 3
    cos_Tp, sin_Tp = angles.cos().to(dtype), angles.sin().to(dtype)
    given = (weight_d, cos_Tp, sin_Tp)
    pairs = layout == "interleaved"
    y_THd, rstd_TH = watched(lambda: rotated.forward(x_THd, *given, EPSILON, pairs), waste=None)
    wide, wide_w = x_THd.double().requires_grad_(), weight_d.double().requires_grad_()

    def reference(rows: slice) -> Tensor:
        normed = norm(wide[rows], wide_w)
        return rotate(normed, cos_Tp[rows].double(), sin_Tp[rows].double(), layout)

    want = reference(slice(None))
    assert_rounded(y_THd, want.detach())
    want.backward(dy_THd.double())
    valid = tokens - tokens // 3
    (dw,) = torch.autograd.grad(reference(slice(valid)), wide_w, dy_THd[:valid].double())
    dx_THd, shares = watched(
        lambda: rotated.backward(dy_THd, x_THd, *given, rstd_TH, valid, pairs), waste=None
    )
    assert wide.grad is not None
    assert_rounded(dx_THd, wide.grad)
    assert_rounded(shares.sum(0), dw)


@pytest.mark.parametrize("shape", ((0, 5), (1, 1), (70, 40), (130, 64)), ids=str)
def test_shares_are_added_to_what_is_there(shape: tuple[int, int]) -> None:
    share_PD, there_D = drawn(*shape), drawn(shape[1])

    def call() -> Tensor:
        into_D = there_D.clone()
        fused.sum_partials(share_PD, into_D)
        return into_D

    assert_rounded(watched(call), there_D.double() + share_PD.double().sum(0))


@pytest.mark.parametrize("summed", (True, False), ids=("summed", "alone"))
def test_torch_knows_the_operations(summed: bool) -> None:
    x_ND, dy_ND, weight_D = drawn(5, 8), drawn(5, 8), drawn(8)
    more_ND = dy_ND if summed else None
    torch.library.opcheck(fused.forward.overload, (x_ND, weight_D, EPSILON, more_ND))
    given = (dy_ND, x_ND, weight_D, x_ND[:, 0].contiguous(), 4, more_ND)
    torch.library.opcheck(fused.backward.overload, given)
    torch.library.opcheck(fused.sum_partials.overload, (x_ND, weight_D))
    x_THd, rstd_TH, angles = x_ND.view(5, 2, 4), x_ND[:, :2].contiguous(), drawn(5, 2)
    given = (weight_D[:4], angles, angles)
    torch.library.opcheck(rotated.forward.overload, (x_THd, *given, EPSILON, summed))
    torch.library.opcheck(rotated.backward.overload, (x_THd, x_THd, *given, rstd_TH, 4, summed))
