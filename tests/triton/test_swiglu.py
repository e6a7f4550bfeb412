"""SwiGLU's kernels against fp64, with the weight of a row and without."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.swiglu import activation, fused
from tests import references
from tests.triton.values import DTYPES, assert_rounded, watched

SHAPES = ((0, 8), (1, 1), (5, 72), (37, 300), (16, 256))


def drawn(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pre-activation, a weight of each row and the gradient."""
    g = torch.Generator().manual_seed(rows + width)
    h_N2F = torch.randn(rows, 2 * width, generator=g).mul_(3).to(dtype)
    return h_N2F, torch.rand(rows, generator=g), torch.randn(rows, width, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weighted", (True, False), ids=("weighted", "plain"))
def test_values_are_those_of_fp64(
    shape: tuple[int, int], dtype: torch.dtype, weighted: bool
) -> None:
    h_N2F, p_N, da_NF = drawn(*shape, dtype)
    wide = h_N2F.double().requires_grad_()
    wide_p = p_N.double().requires_grad_() if weighted else None
    want_NF = references.swiglu(wide, wide_p)
    want_NF.backward(da_NF.double())
    given_p = p_N if weighted else None
    assert_rounded(watched(lambda: fused.forward(h_N2F, given_p)), want_NF.detach())
    dh_N2F, dp_N, a_NF = watched(lambda: fused.backward(h_N2F, given_p, da_NF))
    assert wide.grad is not None
    assert_rounded(dh_N2F, wide.grad)
    assert_rounded(a_NF, want_NF.detach())
    if wide_p is not None:
        assert wide_p.grad is not None
        assert_rounded(dp_N, wide_p.grad)


def test_a_row_of_nan_stays_alone() -> None:
    h_N2F, p_N, da_NF = drawn(9, 40, torch.bfloat16)
    clean = watched(lambda: fused.backward(h_N2F, p_N, da_NF))
    h_N2F[4], p_N[4], da_NF[4] = (float("nan"),) * 3
    for got, want in zip(watched(lambda: fused.backward(h_N2F, p_N, da_NF)), clean, strict=True):
        others = torch.arange(9) != 4
        assert got[4].isnan().all() and torch.equal(got[others], want[others])


@pytest.mark.parametrize("weighted", (True, False), ids=("weighted", "plain"))
def test_torch_knows_the_operations(weighted: bool) -> None:
    h_N2F, p_N, da_NF = drawn(5, 8, torch.bfloat16)
    given_p = p_N if weighted else None
    torch.library.opcheck(fused.forward.overload, (h_N2F, given_p))
    torch.library.opcheck(fused.backward.overload, (h_N2F, given_p, da_NF))


def test_pieces_go_through_kernels_where_rows_do() -> None:
    h_N2F, p_N, da_NF = drawn(5, 8, torch.bfloat16)
    plain = activation.backward(h_N2F, p_N, da_NF)
    for a, b in zip(watched(lambda: activation.backward(h_N2F, p_N, da_NF)), plain, strict=True):
        torch.testing.assert_close(a, b)
    shapes = activation.backward(h_N2F.to("meta"), None, da_NF.to("meta"))
    assert shapes[1] is None and shapes[0].shape == h_N2F.shape
