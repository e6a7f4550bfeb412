"""The router against plain loops and against transformers, and the bugs it must not have."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefold.moe.config import Capacity, Groups, Moe, Router
from moefold.moe.dispatch.config import LocalExperts
from moefold.moe.layer import MoeFfn
from moefold.moe.router import Decision, Routed, RoutingContext, TopKRouter
from moefold.moe.scoring import probabilities
from moefold.moe.topk import capacity_mask, count, select, stable_topk
from moefold.proof.options import choices, scored_routers
from tests.cpu.routing import (
    distribution_by_loop,
    drawn,
    drop_by_loop,
    flow_of,
    route_by_loop,
    router_of,
    rows_of,
)


class ReversedRouter(TopKRouter):
    """A router from outside: it likes what others do not."""

    def scores(self, logits_TE: Tensor) -> Tensor:
        return super().scores(-logits_TE)


class OlderFfn(MoeFfn):
    """A feed-forward of the form that came before routers had records of their own."""

    router_type = ReversedRouter


def test_a_feed_forward_may_still_bring_its_router() -> None:
    record = Moe(width=8, router=Router(experts=4, top_k=2))
    assert isinstance(OlderFfn(record, 8, 0, LocalExperts(), "loop").router, ReversedRouter)
    assert type(MoeFfn(record, 8, 0, LocalExperts(), "loop").router) is TopKRouter


class GreedyRouter(TopKRouter):
    """A router from outside that has places for all experts, and its record for some."""

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        return scores_TE.argsort(1, descending=True)


def test_more_places_than_the_record_says_are_refused() -> None:
    """Dispatch takes it from the record whether any stays empty, and plans how many there are."""
    router = GreedyRouter(Router(experts=4, top_k=2), 6).double()
    x_TD, flow = drawn(5, double=True), flow_of(rows_of([5]), double=True)
    with pytest.raises(ValueError, match=r"GreedyRouter.choose returns 4 .* places is 2"):
        router(x_TD, flow)
    assert router(x_TD, replace(flow, training=False)).sent_TK.shape == (5, 4)


SETTINGS = {
    "softmax": {},
    "softmax, raw": {"renormalise": False},
    "softmax of the chosen": {"order": "topk_first"},
    "softmax of the chosen, bias": {"order": "topk_first", "selection_bias": True, "scale": 1.5},
    "sigmoid": {"score": "sigmoid", "epsilon": 1e-20},
    "sigmoid, raw": {"score": "sigmoid", "renormalise": False, "scale": 2.5},
    "large epsilon": {"score": "sigmoid", "epsilon": 0.25},
    "sqrt softplus": {"score": "sqrt_softplus", "selection_bias": True},
    "bias": {"score": "sigmoid", "selection_bias": True, "scale": 2.5},
    "softmax, bias": {"selection_bias": True},
    "one expert": {"top_k": 1, "renormalise": False},
    "every expert": {"top_k": 12},
    "best group": {"groups": {"count": 4, "keep": 2, "score": "max"}},
    "sum of one": {"groups": {"count": 4, "keep": 2, "best": 1}, "selection_bias": True},
    "sum of two": {"score": "sigmoid", "groups": {"count": 4, "keep": 2}, "selection_bias": True},
    "sum of three": {"groups": {"count": 3, "keep": 1, "best": 3}},
    "all groups kept": {"groups": {"count": 6, "keep": 6}},
    "groups, softmax of the chosen": {"order": "topk_first", "groups": {"count": 4, "keep": 2}},
    **{
        f"{name}, {whole}": {"score": made.score, "order": made.order, "renormalise": whole}
        for whole in (True, False)
        for name, made in scored_routers(experts=12, top_k=3, renormalise=whole).items()
    },
}


def record_of(**changes: Any) -> Router:
    """Return a legal router record of 12 experts, 3 per token, with some changes."""
    record = Router.model_validate({"experts": 12, "top_k": 3, **changes})
    assert not list(record.rules())
    return record


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_equals_a_plain_loop(name: str) -> None:
    """Experts, their order, weights, counts and distribution, in float64."""
    record = record_of(**SETTINGS[name])
    router = router_of(record, double=True)
    x_TD = drawn(40, double=True)
    routed = router(x_TD, flow_of(rows_of([40]), double=True))
    bias = None if router.selection_bias is None else router.selection_bias.tolist()
    logits = (x_TD @ router.weight.T).tolist()
    distribution_TE = probabilities(routed.logits_TE, routed.scores_TE, record)
    for t, row in enumerate(logits):
        experts, weights = route_by_loop(row, bias, record)
        assert routed.decision.experts_TK[t].tolist() == experts
        assert routed.weights_TK[t].tolist() == pytest.approx(weights, rel=1e-12)
        expected = distribution_by_loop(row, record)
        assert distribution_TE[t].tolist() == pytest.approx(expected, rel=1e-12)
    assert routed.decision.kept_TK is None
    assert torch.equal(routed.counts_E, count(routed.decision.experts_TK, record.experts))
    assert routed.counts_E.dtype == torch.int64
    assert int(routed.counts_E.sum()) == 40 * record.top_k


def _hugging_face(name: str) -> tuple[Any, Router]:
    # Here, as every worker collects this file, and one of them runs it.
    from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"hidden_size": 6, "num_experts_per_tok": 3}
    if name == "mixtral":
        return MixtralTopKRouter(MixtralConfig(num_local_experts=12, **sizes)), record_of()
    if name.startswith("qwen3_moe"):
        norm = name.endswith("norm")
        config = Qwen3MoeConfig(num_experts=12, norm_topk_prob=norm, **sizes)
        return Qwen3MoeTopKRouter(config), record_of(renormalise=norm)
    if name == "olmoe":
        config = OlmoeConfig(num_experts=12, norm_topk_prob=False, **sizes)
        return OlmoeTopKRouter(config), record_of(renormalise=False)
    config = DeepseekV3Config(
        n_routed_experts=12, n_group=4, topk_group=2, routed_scaling_factor=2.5, **sizes
    )
    groups = Groups(count=4, keep=2, score="sum_best", best=2)
    changes = {"score": "sigmoid", "selection_bias": True, "epsilon": 1e-20, "scale": 2.5}
    return DeepseekV3TopkRouter(config), record_of(groups=groups, **changes)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe norm", "olmoe", "deepseek_v3"])
def test_experts_and_weights_equal_those_of_transformers(name: str) -> None:
    """On drawn rows; transformers gives each row's experts in some order."""
    theirs, record = _hugging_face(name)
    ours = router_of(record)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if ours.selection_bias is not None:
            theirs.e_score_correction_bias.copy_(ours.selection_bias)
    x_TD = drawn(500).detach()
    routed = ours(x_TD, flow_of(rows_of([500])))
    _, weights_TK, experts_TK = theirs(x_TD[None])
    order_TK = experts_TK.argsort(dim=1)
    mine_TK = routed.decision.experts_TK.argsort(dim=1)
    assert torch.equal(
        experts_TK.gather(1, order_TK), routed.decision.experts_TK.gather(1, mine_TK)
    )
    torch.testing.assert_close(
        routed.weights_TK.gather(1, mine_TK),
        weights_TK.gather(1, order_TK),
        rtol=1e-6,
        atol=1e-7,
    )


def test_the_score_of_a_group_is_a_choice_that_matters() -> None:
    """One expert at 0.9 beside one at 0 wins by maximum and loses by sum against two at 0.6."""
    scores_TE = torch.tensor([[0.9, 0.0, 0.6, 0.6]])
    by_max = select(scores_TE, 1, groups=Groups(count=2, keep=1, score="max"))
    by_sum = select(scores_TE, 1, groups=Groups(count=2, keep=1, score="sum_best"))
    assert (by_max.tolist(), by_sum.tolist()) == ([[0]], [[2]])


def test_a_token_uses_at_most_the_kept_groups() -> None:
    """Whatever the scores, negative ones too."""
    groups = Groups(count=6, keep=2)
    experts_TK = select(torch.randn(300, 24), 5, groups=groups)
    assert max(len({e // 4 for e in row}) for row in experts_TK.tolist()) == 2


@given(
    values=st.lists(
        st.lists(
            st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, math.inf]), min_size=7, max_size=7
        ),
        max_size=5,
    ),
    k=st.integers(1, 7),
)
@settings(max_examples=150, deadline=None)
def test_ties_take_the_lowest_id(values: list[list[float]], k: int) -> None:
    """``best`` is the head of a stable sort, with as many ties and infinities as one likes."""
    values_TE = torch.tensor(values).reshape(-1, 7)
    expected = [sorted(range(7), key=lambda e: (-row[e], e))[:k] for row in values]
    assert stable_topk(values_TE, k).tolist() == expected
    by_sort = values_TE.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert by_sort.tolist() == expected


def test_equal_logits_take_the_first_experts_and_groups() -> None:
    """A router of zeros sends every token to experts 0 .. K - 1."""
    for changes in ({}, {"groups": {"count": 4, "keep": 2}}, {"order": "topk_first"}):
        router = router_of(record_of(**changes))
        torch.nn.init.zeros_(router.weight)
        routed = router(drawn(5), flow_of(rows_of([5])))
        assert routed.decision.experts_TK.tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sum of two", "best group"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_are_routed_the_same_way_each_time(name: str, poison: float) -> None:
    """They do not crash, name real and different experts, and leave other rows alone."""
    record = record_of(**SETTINGS[name])
    router = router_of(record)
    flow = flow_of(rows_of([20]))
    clean = drawn(20).detach()
    dirty = clean.clone()
    dirty[3] = poison
    first, again = (router(dirty, flow).decision for _ in range(2))
    assert torch.equal(first.experts_TK, again.experts_TK)
    assert len(set(first.experts_TK[3].tolist())) == 3
    assert set(first.experts_TK[3].tolist()) <= set(range(12))
    others = torch.arange(20) != 3
    expected = router(clean, flow)
    assert torch.equal(first.experts_TK[others], expected.decision.experts_TK[others])
    weights_TK = router(dirty, flow, first).weights_TK
    assert torch.equal(weights_TK[others], expected.weights_TK[others])


def test_a_score_that_underflows_still_has_a_finite_gradient() -> None:
    """The root of a softplus that is zero in float32."""
    router = router_of(record_of(score="sqrt_softplus"))
    with torch.no_grad():
        router.weight.mul_(1e3)
    x_TD = drawn(30)
    router(x_TD, flow_of(rows_of([30]))).weights_TK.square().sum().backward()
    assert torch.isfinite(x_TD.grad).all() and torch.isfinite(router.weight.grad).all()


def test_scores_are_at_least_float32_and_rows_stay_narrow() -> None:
    """The wider of the record's and the rows' dtype decides; gradients come in the rows' dtype."""
    flow = flow_of(rows_of([8]))
    for asked, rows, result in [
        ("float32", torch.bfloat16, torch.float32),
        ("float32", torch.float64, torch.float64),
        ("float64", torch.bfloat16, torch.float64),
        ("float64", torch.float32, torch.float64),
    ]:
        router = router_of(record_of(dtype=asked))
        x_TD = drawn(8).detach().to(rows).requires_grad_()
        routed = router(x_TD, flow)
        wide = x_TD.detach().to(result) @ router.weight.detach().to(result).T
        torch.testing.assert_close(routed.logits_TE.detach(), wide)
        assert routed.weights_TK.dtype == routed.scores_TE.dtype == result
        routed.weights_TK.square().sum().backward()
        assert x_TD.grad.dtype == rows and router.weight.grad.dtype == torch.float32


# Replay


def gradients_of(
    router: TopKRouter, x_TD: Tensor, routing_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a loss in which every weight counts differently."""
    factor = torch.arange(1.0, routing_weights.numel() + 1).view_as(routing_weights)
    loss = (routing_weights.square() * factor).sum()
    dx_TD, dweight_ED = torch.autograd.grad(loss, (x_TD, router.weight))
    return dx_TD, dweight_ED


@pytest.mark.parametrize("name", ["softmax", "softmax of the chosen", "sum of two", "bias"])
@pytest.mark.parametrize("policy", [None, "probs", "position"])
def test_replaying_a_decision_gives_the_same_bits(name: str, policy: Any) -> None:
    """Weights, counts, and the gradients of rows and router."""
    capacity = None if policy is None else Capacity(factor=0.7, drop=policy)
    router = router_of(record_of(**SETTINGS[name]), capacity=capacity)
    x_TD, flow = drawn(30), flow_of(rows_of([20, 6], pads=4))
    first = router(x_TD, flow)
    again = router(x_TD, flow, first.decision)
    for part in (vars(first) | vars(first.decision)).keys() - {"decision", "counts"}:
        a, b = (({**vars(one), **vars(one.decision)})[part] for one in (first, again))
        assert (a is None and b is None) or torch.equal(a, b), part
    one = gradients_of(router, x_TD, first.weights_TK)
    two = gradients_of(router, x_TD, again.weights_TK)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_foreign_decision_is_obeyed_and_keeps_the_routers_gradient() -> None:
    """Replaying the *worst* experts routes exactly there, with the weights of their scores."""
    record = record_of(renormalise=False)
    router = router_of(record)
    x_TD, flow = drawn(30), flow_of(rows_of([30]))
    own = router(x_TD, flow)
    worst_TK = own.scores_TE.argsort(dim=1)[:, :3]
    routed = router(x_TD, flow, Decision(worst_TK))
    assert torch.equal(routed.decision.experts_TK, worst_TK)
    assert torch.equal(routed.weights_TK, own.scores_TE.gather(1, worst_TK))
    assert torch.equal(routed.counts_E, count(worst_TK, 12))
    assert all(g.abs().max() > 0 for g in gradients_of(router, x_TD, routed.weights_TK))


def test_dropped_copies_have_no_weight_and_no_gradient() -> None:
    """The rest keep theirs: nothing is renormalised after a drop."""
    record = record_of(renormalise=False)
    router = router_of(record, capacity=Capacity(factor=0.5))
    x_TD, flow = drawn(24), flow_of(rows_of([24]))
    routed = router(x_TD, flow)
    kept_TK, experts_TK = routed.decision.kept_TK, routed.decision.experts_TK
    assert kept_TK is not None and not kept_TK.all()
    picked_TK = routed.scores_TE.gather(1, experts_TK)
    assert torch.equal(routed.weights_TK, torch.where(kept_TK, picked_TK, 0))
    assert torch.equal(routed.sent_TK == 12, ~kept_TK)
    (dscores_TE,) = torch.autograd.grad(routed.weights_TK.sum(), routed.scores_TE)
    assert torch.equal(dscores_TE.gather(1, experts_TK), kept_TK.float())


# Capacity


def test_capacity_is_a_share_of_the_copies_rounded_up() -> None:
    """The factor means what is written, not its binary neighbour."""
    table = [(16, 2, 8, 1.0, 4), (17, 2, 8, 1.0, 5), (50, 1, 1, 1.1, 55), (0, 2, 8, 1.25, 0)]
    table += [(1, 1, 64, 1.0, 1), (4096, 8, 64, 1.25, 640), (10, 1, 1, 1e-5, 1)]
    for tokens, top_k, experts, factor, expected in table:
        assert Capacity(factor=factor).max_copies(tokens, top_k, experts) == expected


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_drops_equal_a_plain_loop(data: st.DataObject) -> None:
    """With many equal weights, global ids in any order, and rows that are not valid."""
    rows = data.draw(st.integers(0, 9))
    picks = st.permutations(range(4)).map(lambda p: p[:2])
    experts = data.draw(st.lists(picks, min_size=rows, max_size=rows))
    valid = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    weight = st.lists(st.sampled_from([0.1, 0.2, 0.4]), min_size=2, max_size=2)
    weights = data.draw(st.lists(weight, min_size=rows, max_size=rows))
    token = data.draw(st.permutations(range(100, 100 + rows)))
    limit = data.draw(st.integers(0, rows + 1))
    by_weight = data.draw(st.booleans())
    experts_TK = torch.tensor(experts, dtype=torch.int64).reshape(rows, 2)
    experts_TK[~torch.tensor(valid, dtype=torch.bool)] = 4
    weights_TK = torch.tensor(weights).reshape(rows, 2) if by_weight else None
    token_T = torch.tensor(token, dtype=torch.int64)
    kept_TK = capacity_mask(experts_TK, weights_TK, token_T, limit, 4)
    there = [[e if ok else -1 for e in row] for row, ok in zip(experts, valid, strict=True)]
    stays = drop_by_loop(there, weights if by_weight else None, token, limit)
    assert {(t, k) for t in range(rows) for k in range(2) if kept_TK[t, k]} == stays


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drops_do_not_depend_on_the_order_of_rows(policy: Any) -> None:
    """Equal weights everywhere: only the global token id can decide."""
    router = router_of(record_of(), capacity=Capacity(factor=0.5, drop=policy))
    torch.nn.init.zeros_(router.weight)
    rows = rows_of([16])
    order = torch.randperm(16)
    shuffled = replace(rows, token_T=rows.token_T[order])
    kept = router(drawn(16), flow_of(rows)).decision.kept_TK
    mixed = router(drawn(16), flow_of(shuffled)).decision.kept_TK
    assert kept.any() and not kept.all()
    assert torch.equal(mixed, kept[order])


# Padding


def assert_head_equal(padded: Routed, short: Routed, rows: int) -> None:
    """The valid rows of the padded run, and its counts, are the short run's bits."""
    a, b = padded.decision, short.decision
    assert torch.equal(a.experts_TK[:rows], b.experts_TK)
    assert torch.equal(padded.weights_TK[:rows], short.weights_TK)
    assert torch.equal(padded.counts_E, short.counts_E)
    assert (a.kept_TK is None) == (b.kept_TK is None)
    if a.kept_TK is not None:
        assert torch.equal(a.kept_TK[:rows], b.kept_TK) and not a.kept_TK[rows:].any()
    assert (a.experts_TK[rows:] == padded.scores_TE.shape[1]).all()
    assert (padded.sent_TK[rows:] == padded.scores_TE.shape[1]).all()
    assert (padded.weights_TK[rows:] == 0).all()


@pytest.mark.parametrize("pads", range(8))
@pytest.mark.parametrize("policy", [None, "probs", "position"])
def test_padding_rows_are_not_routed(pads: int, policy: Any) -> None:
    """They take no capacity, count nowhere, change no drop and get no gradient."""
    capacity = None if policy is None else Capacity(factor=0.8, drop=policy)
    router = router_of(record_of(), capacity=capacity)
    x_TD = drawn(24 + pads)
    padded = router(x_TD, flow_of(rows_of([17, 7], pads=pads)))
    short_TD = x_TD.detach()[:24].requires_grad_()
    short = router(short_TD, flow_of(rows_of([17, 7])))
    assert_head_equal(padded, short, 24)
    assert int(padded.counts_E.sum()) <= 24 * 3
    dx_TD, dweight_ED = gradients_of(router, x_TD, padded.weights_TK)
    dshort_TD, dshort_ED = gradients_of(router, short_TD, short.weights_TK)
    assert torch.equal(dx_TD[:24], dshort_TD)
    assert (dx_TD[24:] == 0).all()
    torch.testing.assert_close(dweight_ED, dshort_ED, rtol=1e-6, atol=1e-7)


@given(
    rows=st.integers(16, 60),
    pads=st.integers(0, 40),
    name=st.sampled_from(sorted(SETTINGS)),
    factor=st.sampled_from([None, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_masking_equals_shortening_bit_for_bit(
    rows: int, pads: int, name: str, factor: float | None, seed: int
) -> None:
    """Every setting, any number of padding rows."""
    capacity = None if factor is None else Capacity(factor=factor)
    router = router_of(record_of(**SETTINGS[name]), capacity=capacity)
    x_TD = drawn(rows + pads, seed=seed).detach()
    padded = router(x_TD, flow_of(rows_of([rows], pads=pads)))
    assert_head_equal(padded, router(x_TD[:rows], flow_of(rows_of([rows]))), rows)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["softmax", "softmax of the chosen", "sum of two"])
@pytest.mark.parametrize("factor", [None, 0.6])
def test_poison_in_padding_rows_stays_there(name: str, poison: float, factor: float | None) -> None:
    """NaN or infinity times zero would reach the router's gradient."""
    capacity = None if factor is None else Capacity(factor=factor)
    router = router_of(record_of(**SETTINGS[name]), capacity=capacity)
    clean = drawn(24).detach()
    dirty = clean.clone()
    dirty[20:] = poison
    results = []
    for x_TD in (clean.requires_grad_(), dirty.requires_grad_()):
        routed = router(x_TD, flow_of(rows_of([20], pads=4)))
        assert torch.isfinite(routed.scores_TE).all()
        grads = gradients_of(router, x_TD, routed.weights_TK)
        results.append((routed.weights_TK, routed.counts_E, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.isfinite(results[0][3]).all()


@pytest.mark.parametrize("rows", [0, 4])
def test_no_valid_row_at_all(rows: int) -> None:
    """Nothing is sent, and gradients are zeros rather than absent."""
    router = router_of(record_of(), capacity=Capacity(factor=1.0))
    x_TD = drawn(rows)
    routing = router(x_TD, flow_of(rows_of([], pads=rows)))
    assert routing.counts_E.tolist() == [0] * 12
    routing.weights_TK.sum().backward()
    assert (router.weight.grad == 0).all() and (x_TD.grad == 0).all()


# What is kept, and in which dtype


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.type(torch.bfloat16),
        lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
    ],
)
def test_the_bias_stays_float32_whatever_the_model_is_cast_to(cast: Any) -> None:
    """With all its digits."""
    router = router_of(record_of(selection_bias=True))
    before = router.selection_bias.clone()
    cast(router)
    assert router.selection_bias.dtype == torch.float32
    assert torch.equal(router.selection_bias, before)
    assert router.weight.dtype != torch.float32


def test_names_and_kinds_of_what_is_saved() -> None:
    """The weight is trained; the bias is a saved buffer where the record has one."""
    assert set(router_of(record_of()).state_dict()) == {"weight"}
    router = router_of(record_of(selection_bias=True))
    assert set(router.state_dict()) == {"weight", "selection_bias"}
    assert [n for n, _ in router.named_parameters()] == ["weight"]
    assert router.to("meta").selection_bias.device.type == "meta"


def test_one_expert_per_token_still_teaches_the_router() -> None:
    """Settings whose single weight is always one are refused; the legal ones have a gradient."""
    for score in choices(Router, "score"):
        constant = Router(experts=12, top_k=1, score=score)
        assert [v.path for v in constant.rules()] == [("renormalise",)]
        legal = record_of(top_k=1, score=score, renormalise=False)
        router, x_TD = router_of(legal), drawn(20)
        routed = router(x_TD, flow_of(rows_of([20])))
        assert all(g.abs().max() > 0 for g in gradients_of(router, x_TD, routed.weights_TK))
    late = Router(experts=12, top_k=1, order="topk_first")
    assert [v.path for v in late.rules()] == [("order",)]
