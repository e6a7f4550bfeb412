"""Rows in any numbers: nothing is rounded up to what a product would like.

T tokens, K experts per token, E experts, R rows after dispatch, D and F widths.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moefold.kernels.grouped import grouped, loop
from moefold.kernels.grouped.choose import choose_kernel
from moefold.moe.dispatch.base import permute
from moefold.moe.dispatch.routing_plan import RoutedTokens

EXPERTS = 4


@given(st.lists(st.integers(0, EXPERTS), min_size=1, max_size=60), st.integers(1, 3))
def test_offsets_end_where_rows_end(chosen: list[int], top_k: int) -> None:
    """Experts get the rows that chose them, whatever their number; some go to none."""
    experts_TK = torch.tensor([[(e + k) % (EXPERTS + 1) for k in range(top_k)] for e in chosen])
    x_TD = torch.randn(len(chosen), 8, requires_grad=True)
    weights_TK = torch.rand(len(chosen), top_k)
    sent = permute(RoutedTokens(x_TD, weights_TK, experts_TK), EXPERTS)
    wanted = [int((experts_TK == e).sum()) for e in range(EXPERTS)]
    assert sent.offs_E.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist() == wanted
    rows = [x_TD[(experts_TK == e).any(1).nonzero()[:, 0]] for e in range(EXPERTS)]
    assert torch.equal(sent.x_RD[: sum(wanted)], torch.cat(rows))


@pytest.mark.parametrize("counts", [(90, 0, 0, 0), (17, 1, 29, 43), (1, 0, 3, 86)])
def test_fewer_rows_than_any_multiple_are_multiplied_exactly(counts: tuple[int, ...]) -> None:
    """100 rows of which 90 are routed."""
    offs_E = torch.tensor(counts).cumsum(0).to(torch.int32)
    x_RD, w_EFD = torch.randn(100, 16), torch.randn(EXPERTS, 8, 16)
    dy_RF = torch.randn(100, 8)
    kernel = choose_kernel("grouped", x_RD.dtype, 16, 8)
    ours = (
        kernel.product(x_RD, w_EFD, offs_E)[:90],
        kernel.weight_gradient(dy_RF, x_RD, offs_E, None),
    )
    theirs = loop.product(x_RD, w_EFD, offs_E)[:90], loop.weight_gradient(dy_RF, x_RD, offs_E, None)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [(300, 0, 37, 70), (0, 5, 90, 300), (16, 17, 0, 0)])
def test_products_in_steps_of_rows_reach_no_other_row(counts: tuple[int, ...]) -> None:
    """16-bit rows on a CPU; those of an expert and those past the last offset are NaN."""
    offs_E, rows = torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts)
    kernel = choose_kernel("auto", torch.bfloat16, 16, 8)
    assert kernel.name == "loop"
    x_RD, w_EFD = torch.randn(rows + 9, 16).bfloat16(), torch.randn(EXPERTS, 8, 16).bfloat16()
    dy_RF = torch.randn(rows + 9, 8).bfloat16()
    for values in (x_RD, dy_RF):
        values[rows:] = values[: counts[0]] = torch.nan
    into = torch.randn(EXPERTS, 8, 16)
    y_RF, dx_RD = kernel.product(x_RD, w_EFD, offs_E), kernel.input_gradient(dy_RF, w_EFD, offs_E)
    dw_EFD = kernel.weight_gradient(dy_RF, x_RD, offs_E, None)
    added_EFD = kernel.weight_gradient(dy_RF, x_RD, offs_E, into.clone()) - into
    near = {"equal_nan": True, "rtol": 2e-2, "atol": 5e-2}
    for e, end in enumerate(offs_E.tolist()):
        place = slice(end - counts[e], end)
        x, dy, w = x_RD[place].float(), dy_RF[place].float(), w_EFD[e].float()
        torch.testing.assert_close(y_RF[place].float(), x @ w.t(), **near)
        torch.testing.assert_close(dx_RD[place].float(), dy @ w, **near)
        for found in (dw_EFD[e], added_EFD[e]):
            torch.testing.assert_close(found, dy.t() @ x, **near)


def test_a_device_that_leaves_empty_groups_as_they_were_is_found_and_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As pytorch#172439 has it, and with the NaN of #193633."""
    x_RD, dy_RF = torch.randn(90, 16), torch.randn(90, 8)
    offs_E = torch.tensor((40, 40, 90, 90), dtype=torch.int32)
    want = grouped.weight_gradient(dy_RF, x_RD, offs_E, torch.ones(4, 8, 16))
    sound, cpu = F.grouped_mm, torch.device("cpu")
    assert not grouped.leaves_empty_groups_unwritten.__wrapped__(cpu)

    def unwritten(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        empty_E = offs.diff(prepend=offs.new_zeros(1)) == 0
        return sound(a, b, offs=offs).masked_fill(empty_E[:, None, None], torch.nan)

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    monkeypatch.setattr(grouped, "UNVERIFIED_DEVICES", ("cpu",))
    monkeypatch.setattr(
        grouped, "leaves_empty_groups_unwritten", grouped.leaves_empty_groups_unwritten.__wrapped__
    )
    assert grouped.leaves_empty_groups_unwritten(cpu)
    found = grouped.weight_gradient(dy_RF, x_RD, offs_E, torch.ones(4, 8, 16))
    assert torch.equal(found, want) and (found[1] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widths_that_do_not_fit_are_refused_in_words(dtype: torch.dtype) -> None:
    step = 16 // dtype.itemsize
    for width in range(1, 65):
        if width % step:
            with pytest.raises(ValueError, match=f"Use multiples of {step}"):
                choose_kernel("grouped", dtype, 64, width)
            assert choose_kernel("auto", dtype, 64, width).name == "loop"
        else:
            assert grouped.fits(dtype, 64, width)
            assert choose_kernel("grouped", dtype, 64, width).name == "grouped_mm"
