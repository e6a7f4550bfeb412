"""The checks that a GPU runs beyond 2**31 elements, at a size that every machine has."""

import pytest
import torch

from moefold.kernels.grouped.choose import choose_kernel
from tests import large_rows
from tests.large_rows import Size

SMALL = Size(tokens=300, copies=2, hidden=32, width=16, experts=5, device="cpu", piece=64)


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
def test_permute_products_and_combine_piece_by_piece(kernel: str) -> None:
    large_rows.check(SMALL, choose_kernel(kernel, torch.bfloat16, SMALL.hidden, SMALL.width))


def test_a_row_in_a_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an overflowing index leaves it: the last rows hold what belongs elsewhere."""
    plain = large_rows.Dispatcher.dispatch

    def wrong(*args: object) -> object:
        sent = plain(*args)  # type: ignore[arg-type]
        sent.x_RD[500:502] = sent.x_RD[:2].clone()
        return sent

    monkeypatch.setattr(large_rows.Dispatcher, "dispatch", wrong)
    with pytest.raises(AssertionError):
        large_rows.check(SMALL, choose_kernel("loop", torch.bfloat16))
