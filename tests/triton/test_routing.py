"""Kernels of the router: choices and order to the bit, weights and gradients within rounding."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.routing import fused
from moefold.moe.config import Groups, Router
from moefold.moe.dispatch.routing_plan import sort_copies
from moefold.moe.scoring import weights
from moefold.moe.topk import count, select
from tests.triton.values import assert_rounded, watched

THREE = Groups(count=6, keep=3, score="sum_best", best=2)
CHOICES = {
    "2 of 8": (8, 2, None),
    "8 of 128": (128, 8, None),
    "4 of 60": (60, 4, None),
    "6 of 64, best groups": (64, 6, Groups(count=8, keep=3, score="max")),
    "8 of 256, groups": (256, 8, Groups(count=8, keep=4)),
    "4 of 60, groups of 10": (60, 4, THREE),
    "all of 3": (3, 3, None),
}


def drawn(tokens: int, experts: int) -> Tensor:
    """Return scores with ties, infinities, zeros of both signs and NaN."""
    scores_TE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))
    scores_TE[:, 1] = scores_TE[:, 0]
    scores_TE[2], scores_TE[3], scores_TE[4] = 0, -0.0, torch.nan
    scores_TE[3, ::2] = 0
    scores_TE[5, 2], scores_TE[6, -1] = torch.nan, torch.inf
    scores_TE[7, : experts // 2] = -torch.inf
    return scores_TE


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("biased", (False, True), ids=("plain", "biased"))
def test_choices_are_those_of_the_plain_way(name: str, biased: bool) -> None:
    experts, top_k, groups = CHOICES[name]
    scores_TE, valid_T = drawn(19, experts), torch.arange(19) < 17
    bias_E = torch.linspace(-0.5, 0.5, experts) if biased else None

    def chosen() -> Tensor:
        return select(scores_TE, top_k, bias_E=bias_E, groups=groups, valid_T=valid_T)

    with force_triton(False):
        want_TK = chosen()
    assert torch.equal(watched(chosen, waste=1.2), want_TK)


def routed(tokens: int, top_k: int, buckets: int) -> Tensor:
    """Return drawn buckets, of an odd number of tokens a few "none"."""
    g = torch.Generator().manual_seed(tokens)
    return torch.randint(buckets + tokens % 2, (tokens, top_k), generator=g)


@pytest.mark.parametrize(
    "sizes", [(37, 3, 8), (21, 8, 256), (1, 1, 1), (0, 2, 8), (300, 4, 60), (301, 4, 6)], ids=str
)
def test_copies_stand_as_a_stable_sort_puts_them(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MAX_CHUNKS", 4)
    tokens, top_k, buckets = sizes
    buckets_TK = routed(tokens, top_k, buckets)
    with force_triton(False):
        want, counts_B = sort_copies(buckets_TK, buckets), count(buckets_TK, buckets)

    def order() -> tuple[Tensor, ...]:
        return tuple(sort_copies(buckets_TK, buckets))

    for got, theirs in zip(watched(order, tokens > 0, waste=None), want, strict=True):
        assert got.dtype == theirs.dtype and torch.equal(got, theirs)
    counted_B = watched(lambda: count(buckets_TK, buckets), whole=False, waste=None)
    assert counted_B.dtype == torch.int64 and torch.equal(counted_B, counts_B)


def test_counts_of_more_buckets_than_a_program_keeps_go_the_plain_way() -> None:
    buckets_TK = torch.tensor([[3000, 1], [0, 3000]])
    with force_triton(True):
        assert count(buckets_TK, 5000)[3000] == 2
        assert sort_copies(buckets_TK, 5000).copy_R.tolist() == [2, 1, 0, 3]


RULES = {
    "as they are": Router(experts=60, top_k=4, renormalise=False, scale=0.5),
    "shares": Router(experts=60, top_k=4, epsilon=1e-3, scale=2.5),
    "softmax": Router(experts=60, top_k=4, order="topk_first"),
}


@pytest.mark.parametrize("rule", RULES)
def test_weights_and_gradients_are_those_of_fp64(rule: str) -> None:
    g = torch.Generator().manual_seed(0)
    # Experts lie first in memory: no kernel may take that for the order of gradients.
    scores_TE, record = torch.rand(60, 70, generator=g).t(), RULES[rule]
    ids_TK = torch.rand(70, 60, generator=g).argsort(1)[:, :4]
    dweights_TK = torch.randn(70, 4, generator=g)
    ids_TK[68:], dweights_TK[68:] = 60, 0
    wide_TE = scores_TE.double().requires_grad_()
    want_TK = weights(wide_TE, ids_TK, record)
    want_TK.backward(dweights_TK.double())

    def ours() -> tuple[Tensor, Tensor]:
        given_TE = scores_TE.clone().requires_grad_()
        weights_TK = weights(given_TE, ids_TK, record)
        weights_TK.backward(dweights_TK)
        assert given_TE.grad is not None
        return weights_TK.detach(), given_TE.grad

    weights_TK, dscores_TE = watched(ours, whole=False, waste=None)
    assert_rounded(weights_TK, want_TK.detach())
    assert wide_TE.grad is not None
    assert_rounded(dscores_TE, wide_TE.grad)


def test_torch_knows_the_operations() -> None:
    scores_TE, ids_TK, how = torch.rand(5, 8), torch.arange(10).view(5, 2) % 8, (1, 0.0, 1.0)
    torch.library.opcheck(fused.select.overload, (scores_TE, None, None, 2, 1, 1, 1))
    torch.library.opcheck(fused.order.overload, (ids_TK, 8))
    torch.library.opcheck(fused.count.overload, (ids_TK, 8))
    torch.library.opcheck(fused._chosen_weights.overload, (scores_TE, ids_TK, *how))
    given = (torch.rand(5, 2), scores_TE, ids_TK, *how)
    torch.library.opcheck(fused._chosen_weights_backward.overload, given)
