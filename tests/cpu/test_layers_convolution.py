"""A short convolution between gates, beside torch's own of each document by itself."""

import pytest
import torch

from moefold.kernels.convolution.short import short_convolution
from moefold.kernels.operand import Operand
from tests import references

LENGTHS = (1, 7, 2, 6)
"""Of documents; two rows of padding follow."""


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_documents_are_convolved_by_themselves_and_padding_leaks_nothing(taps: int) -> None:
    torch.manual_seed(taps)
    rows, channels = sum(LENGTHS), 3
    h_T3C = torch.randn(rows + 2, 3 * channels, dtype=torch.float64)
    dy_TC = torch.randn(rows + 2, channels, dtype=torch.float64)
    h_T3C[rows:] = dy_TC[rows:] = torch.nan
    h_T3C.requires_grad_()
    weight = torch.randn(channels, 1, taps, dtype=torch.float64, requires_grad=True)
    positions_T = torch.cat([torch.arange(n) for n in (*LENGTHS, 1, 1)])
    operand = Operand(weight, weight)
    found = short_convolution(h_T3C, None, operand, positions_T, gated=True, n_valid=rows)
    wanted = references.convolution(h_T3C[:rows], weight, LENGTHS)
    torch.testing.assert_close(found[:rows], wanted, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad(found, (h_T3C, weight), dy_TC)
    theirs = torch.autograd.grad(wanted, (h_T3C, weight), dy_TC[:rows])
    torch.testing.assert_close(mine[0][:rows], theirs[0][:rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-12, atol=1e-12)
