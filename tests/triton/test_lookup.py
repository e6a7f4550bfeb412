"""The kernel that adds gradients of looked-up rows to their table's, against fp64."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.gradients import AccumulatingSink
from moefold.kernels.lookup import fused
from moefold.kernels.operand import Operand
from moefold.layers.linear import _Lookup
from tests.triton.values import DTYPES, assert_rounded, watched

SHAPES = ((0, 8, 5), (1, 1, 1), (9, 40, 3), (12, 600, 50))


def drawn(rows: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows' gradients, their ids, and the table's gradient so far."""
    g = torch.Generator().manual_seed(rows + width)
    ids_T = torch.randint(0, vocab, (rows,), generator=g)
    return (
        torch.randn(rows, width, generator=g).to(dtype),
        ids_T,
        torch.randn(vocab, width, generator=g),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_is_added_to_its_id(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows_TD, ids_T, grad_VD = drawn(*shape, dtype)

    def added() -> Tensor:
        into_VD = grad_VD.clone()
        fused.gradient(rows_TD, *ids_T.sort(stable=True), into_VD)
        return into_VD

    want_VD = grad_VD.double().index_add(0, ids_T, rows_TD.double())
    assert_rounded(watched(added, whole=False, waste=2), want_VD)


def test_the_embedding_goes_through_the_kernel_where_rows_do() -> None:
    rows_TD, ids_T, table_VD = drawn(12, 40, 5, torch.float32)
    found = []
    for way in (False, True):
        table = table_VD.clone().requires_grad_()
        with force_triton(way):
            for _ in range(2):
                held = Operand(table, table.detach())
                out_TD = _Lookup.apply(table, held, ids_T, 10, AccumulatingSink())
                out_TD.backward(rows_TD)
        found.append(table.grad)
    torch.testing.assert_close(*found)


def test_torch_knows_the_operation() -> None:
    rows_TD, ids_T, grad_VD = drawn(9, 40, 3, torch.bfloat16)
    torch.library.opcheck(fused.gradient.overload, (rows_TD, *ids_T.sort(stable=True), grad_VD))
