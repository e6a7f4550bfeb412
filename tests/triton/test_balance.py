"""Kernels of balancing: counters to the bit, values and gradients within rounding of fp64."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.routing import balance
from tests.triton.values import assert_rounded, watched

SIZES = ((1, 1), (37, 60), (300, 8), (70, 128), (9, 1030))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def choices(*shape: int) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_balance_value_and_its_gradient_are_those_of_fp64(size: tuple[int, int]) -> None:
    rows, experts = size
    probability_TE, counts_E = drawn(*size).softmax(1), choices(experts)
    wide = probability_TE.double().requires_grad_()
    tokens = max(int(counts_E.sum()) // 2, 1)
    want = (counts_E.double() / tokens * wide.sum(0)).sum() / (rows + 3) * experts / 2
    (3 * want).backward()
    shares_PE = watched(lambda: balance.partial_row_sums(probability_TE))
    assert_rounded(shares_PE.sum(0), wide.detach().sum(0))

    def ours() -> tuple[Tensor, Tensor]:
        given_TE = probability_TE.clone().requires_grad_()
        value = balance.load_balance(given_TE, shares_PE, counts_E, 2, rows + 3)
        (3 * value).backward()
        assert given_TE.grad is not None
        return value.detach(), given_TE.grad

    value, gradient_TE = watched(ours, whole=False)
    assert_rounded(value, want.detach())
    assert wide.grad is not None
    assert_rounded(gradient_TE, wide.grad)


def test_rows_that_are_not_there_and_no_choices_give_zero() -> None:
    none_TE, counts_E = torch.empty(0, 8), torch.zeros(8, dtype=torch.int64)
    shares_PE = watched(lambda: balance.partial_row_sums(none_TE))
    assert shares_PE.tolist() == [[0] * 8]
    values = watched(lambda: balance.load_balance(none_TE, shares_PE, counts_E, 2, 1), waste=None)
    assert float(values) == 0
    assert float(watched(lambda: balance.z_loss(none_TE, 1), waste=None)) == 0
    assert watched(lambda: balance.normalised(none_TE), waste=None).shape == (0, 8)


@pytest.mark.parametrize("ranks", (None, 1, 3))
@pytest.mark.parametrize("experts", (1, 60, 128))
def test_counters_are_those_of_whole_numbers(experts: int, ranks: int | None) -> None:
    before, rank = [choices(experts) + i for i in range(3)], 1 if ranks == 3 else 0
    load_E, sent_E, shares_PE = choices(experts) + 5, choices(experts), drawn(7, experts)
    by_rank_DE = None if ranks is None else choices(ranks, experts)

    def ours() -> tuple[Tensor, ...]:
        load, sent, plain = (counter.clone() for counter in before)
        tokens, probability = torch.tensor(7), torch.ones(experts)
        given = (shares_PE, load_E, sent_E, by_rank_DE)
        so_far_E = balance.update_counters(*given, load, sent, tokens, plain, probability, 11, rank)
        return load, sent, tokens, plain, probability, so_far_E

    load, sent, tokens, plain, probability, so_far_E = watched(ours, whole=False, waste=1.1)
    assert torch.equal(load, before[0] + load_E) and torch.equal(sent, before[1] + sent_E)
    assert int(tokens) == 18
    assert_rounded(probability, shares_PE.double().sum(0) + 1)
    if by_rank_DE is None:
        assert torch.equal(plain, before[2]) and not so_far_E.numel()
    else:
        assert torch.equal(plain, before[2] + by_rank_DE.sum(0))
        assert torch.equal(so_far_E, before[2] + by_rank_DE[: rank + 1].sum(0))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_squares_of_log_sums_are_those_of_fp64(size: tuple[int, int]) -> None:
    logits_TE = drawn(*size) * 3
    wide = logits_TE.double().requires_grad_()
    want = wide.logsumexp(1).square().sum() / 17
    (0.5 * want).backward()

    def ours() -> tuple[Tensor, Tensor]:
        given_TE = logits_TE.clone().requires_grad_()
        value = balance.z_loss(given_TE, 17)
        (0.5 * value).backward()
        assert given_TE.grad is not None
        return value.detach(), given_TE.grad

    value, gradient_TE = watched(ours, waste=None)
    assert_rounded(value, want.detach())
    assert wide.grad is not None
    assert_rounded(gradient_TE, wide.grad)


@pytest.mark.parametrize("expanded", (False, True), ids=("rows", "one row"))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_over_their_sum_are_those_of_fp64(size: tuple[int, int], expanded: bool) -> None:
    scores_TE, dout_TE = drawn(*size).sigmoid(), drawn(*size)
    scores_TE[0] = 0
    dout_TE = dout_TE[:1].expand(size) if expanded else dout_TE
    wide = scores_TE.double().requires_grad_()
    want_TE = wide / wide.sum(1, keepdim=True).clamp(min=balance.TINY)
    want_TE.backward(dout_TE.double())

    def ours() -> tuple[Tensor, Tensor]:
        given_TE = scores_TE.clone().requires_grad_()
        out_TE = balance.normalised(given_TE)
        out_TE.backward(dout_TE)
        assert given_TE.grad is not None
        return out_TE.detach(), given_TE.grad

    out_TE, gradient_TE = watched(ours, waste=None)
    assert_rounded(out_TE, want_TE.detach())
    assert wide.grad is not None
    # A row of zeros is divided by the least normal number: its gradient is beside no other's.
    assert_rounded(gradient_TE[1:], wide.grad[1:])
    torch.testing.assert_close(gradient_TE[0].double(), wide.grad[0], rtol=1e-6, atol=0)


def test_torch_knows_the_operations() -> None:
    rows_TE, counts_E = drawn(5, 8), choices(8)
    shares_PE = balance.partial_row_sums.launch(rows_TE)
    check = torch.library.opcheck
    check(balance.partial_row_sums.overload, (rows_TE,))
    check(balance._load_value.overload, (shares_PE, counts_E, 2, 5))
    counters = [counts_E.clone() for _ in range(3)]
    for by_rank_DE in (None, counts_E[None]):
        given = (shares_PE, counts_E, counts_E, by_rank_DE, *counters[:2], torch.tensor(3))
        check(balance.update_counters.overload, (*given, counters[2], torch.ones(8), 5, 0))
    check(balance._z_loss_value.overload, (rows_TE, 5))
    given = (torch.tensor(1.0), rows_TE, rows_TE[:, 0].contiguous(), 5)
    check(balance._z_loss_gradient.overload, given)
    check(balance._normalised.overload, (rows_TE,))
    check(balance._normalised_backward.overload, (rows_TE, rows_TE))
