"""Balance terms, the bias update, counters and health, against loops and closed forms."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.layers.flow import Flow
from moefold.moe.balance import Balance, Observed, Term, count_choices, sum_rows
from moefold.moe.config import BALANCE, Aux, Bias, Capacity, Groups, Moe, Router, Z
from moefold.moe.router import Decision, TopKRouter
from moefold.proof.options import scored_routers
from tests.cpu.routing import (
    distribution_by_loop,
    drawn,
    flow_of,
    observe,
    route_by_loop,
    router_of,
    rows_of,
)

OVER = ("micro_batch", "sequence", "global_batch")
ALL = (*(Aux(over=over) for over in OVER), Z())
SCORES = {
    "softmax": {},
    "softmax of the chosen": {"order": "topk_first"},
    "sigmoid": {"score": "sigmoid", "epsilon": 1e-20, "selection_bias": True},
    "sqrt softplus in groups": {"score": "sqrt_softplus", "groups": Groups(count=4, keep=2)},
    **{
        name: {"score": made.score, "order": made.order}
        for name, made in scored_routers(experts=8, top_k=2).items()
    },
}


def moe_of(*balance: Record, capacity: Capacity | None = None, **changes: Any) -> Moe:
    """Return a layer's record: 8 experts, 2 per token, with some changes to the router."""
    router = Router(**{"experts": 8, "top_k": 2, **changes})
    record = Moe(width=4, router=router, capacity=capacity, balance=balance)
    assert not [*record.rules(), *router.rules()]
    return record


def plain_logits(router: TopKRouter, x_TD: Tensor) -> list[list[float]]:
    """Return the logits as a plain product gives them."""
    return (x_TD.detach() @ router.weight.detach().T).tolist()


def aux_by_loop(
    logits: Sequence[Sequence[float]],
    populations: Sequence[Sequence[int]],
    record: Router,
    counts: Sequence[float] | None = None,
    tokens: int = 0,
) -> float:
    """Return E / (K T^2) sum_i n_i sum_t p_i(t) of each population, weighed by its tokens."""
    plain = record.model_copy(update={"groups": None})
    total = sum(len(p) for p in populations)
    value = 0.0
    for rows in populations:
        n = [0.0] * record.experts if counts is None else list(counts)
        mean = [0.0] * record.experts
        for t in rows:
            for e in route_by_loop(logits[t], None, plain)[0] if counts is None else []:
                n[e] += 1
            for e, p in enumerate(distribution_by_loop(logits[t], record)):
                mean[e] += p / len(rows)
        of = tokens or len(rows)
        term = record.experts / record.top_k * sum(a / of * b for a, b in zip(n, mean, strict=True))
        value += term * len(rows) / total
    return value


@pytest.mark.parametrize("name", SCORES)
def test_every_term_equals_a_plain_loop(name: str) -> None:
    """On two micro-batches of segments and padding, in float64."""
    record = moe_of(*ALL, **SCORES[name])
    router, balance = router_of(record.router, double=True), Balance(record)
    seen, tokens = [0.0] * 8, 0
    for seed, lengths in enumerate(([5, 1, 7], [9])):
        rows = rows_of(lengths, pads=3)
        x_TD = drawn(rows.rows, seed=seed, double=True)
        flow = flow_of(rows, double=True)
        _, decision, terms = observe(record, router, x_TD, flow, balance)
        logits = plain_logits(router, x_TD)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        segments = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
        whole = [list(range(sum(lengths)))]
        for t in whole[0]:
            plain = record.router.model_copy(update={"groups": None})
            for e in route_by_loop(logits[t], None, plain)[0]:
                seen[e] += 1
        tokens += sum(lengths)
        square = sum(float(torch.tensor(logits[t]).double().logsumexp(0)) ** 2 for t in whole[0])
        assert {k: float(v.detach()) for k, v in terms.items()} == pytest.approx(
            {
                "aux_micro_batch": aux_by_loop(logits, whole, record.router),
                "aux_sequence": aux_by_loop(logits, segments, record.router),
                "aux_global_batch": aux_by_loop(logits, whole, record.router, seen, tokens),
                "z": square / sum(lengths),
            },
            rel=1e-6,
        )
        assert decision.counts["global_batch"][0].tolist() == seen
        assert all(v.dtype == torch.float64 and v.dim() == 0 for v in terms.values())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [2, 6, 8, 10, 64, 160, 384])
@pytest.mark.parametrize("top_k", [1, 2])
def test_uniform_routing_gives_exactly_one(score: Any, experts: int, top_k: int) -> None:
    """Each of the three, over segments of odd lengths, in float32."""
    auxes = [Aux(over=over) for over in OVER]
    record = moe_of(*auxes, experts=experts, top_k=top_k, score=score, renormalise=False)
    router, balance = router_of(record.router), Balance(record)
    torch.nn.init.zeros_(router.weight)
    for lengths in ([50, 33, 7], [61], [1]):
        flow = flow_of(rows_of(lengths, pads=5))
        _, _, terms = observe(record, router, drawn(flow.rows.rows), flow, balance)
        assert {k: float(v.detach()) for k, v in terms.items()} == dict.fromkeys(terms, 1.0)


def one_hot_rows(router: TopKRouter, experts: Sequence[int], rows: int, height: float) -> Tensor:
    """Set the router to read its input, and return rows whose logits pick ``experts`` alone."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(*router.weight.shape, dtype=router.weight.dtype))
    x_TD = torch.full((rows, router.weight.shape[1]), -height, dtype=router.weight.dtype)
    x_TD[:, list(experts)] = height
    return x_TD.requires_grad_()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_collapsed_router_gives_experts_over_top_k(top_k: int, score: Any) -> None:
    """All tokens on the same K experts, each with probability 1 / K."""
    auxes = [Aux(over=over) for over in OVER]
    record = moe_of(*auxes, top_k=top_k, score=score, renormalise=False)
    router = router_of(record.router, hidden=8, double=True)
    x_TD = one_hot_rows(router, range(8 - top_k, 8), 20, 400.0)
    flow = flow_of(rows_of([13, 7]), double=True)
    _, _, terms = observe(record, router, x_TD, flow)
    for value in terms.values():
        assert float(value.detach()) == pytest.approx(8 / top_k, rel=1e-15)


@pytest.mark.parametrize("over", OVER)
def test_the_gradient_of_an_auxiliary_loss_is_the_closed_form(over: Any) -> None:
    """With g_i = E / (K T) f_i: d value / d logit_ti = p_ti (g_i - sum_j p_tj g_j)."""
    record = moe_of(Aux(over=over))
    router = router_of(record.router, hidden=8, double=True)
    lengths, balance = [6, 3, 8], Balance(record)
    f_NE = torch.zeros(3, 8, dtype=torch.float64)
    for seed in range(2):
        x_TD = drawn(20, hidden=8, seed=seed, double=True)
        flow = flow_of(rows_of(lengths, pads=3), double=True)
        routed, _, terms = observe(record, router, x_TD, flow, balance)
        experts_NK = routed.decision.experts_TK[:17].split(lengths)
        counts_NE = torch.stack([torch.bincount(e.flatten(), minlength=8) for e in experts_NK])
        counts_NE = counts_NE.double()
        if over == "sequence":
            f_NE = counts_NE / torch.tensor(lengths)[:, None]
        elif over == "micro_batch":
            f_NE = (counts_NE.sum(0) / 17).expand(3, 8)
        else:  # both micro-batches hold 17 tokens
            f_NE = (f_NE[:1] * seed + counts_NE.sum(0) / 17).expand(3, 8) / (seed + 1)
    g_TE = 8 / (2 * 17) * f_NE.repeat_interleave(torch.tensor(lengths), dim=0)
    p_TE = (x_TD @ router.weight.T).softmax(1)[:17]
    expected_TE = p_TE * (g_TE - (p_TE * g_TE).sum(1, keepdim=True))
    (value,) = terms.values()
    dx_TD, dweight_ED = torch.autograd.grad(value, (x_TD, router.weight))
    torch.testing.assert_close(dx_TD[:17], expected_TE @ router.weight, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(dweight_ED, expected_TE.T @ x_TD[:17], rtol=1e-12, atol=1e-15)
    assert (dx_TD[17:] == 0).all()


def test_the_gradient_of_the_z_loss_is_the_closed_form() -> None:
    """d value / d logit = 2 / T * logsumexp * softmax."""
    record = moe_of(Z())
    router = router_of(record.router, hidden=8, double=True)
    x_TD = drawn(20, hidden=8, double=True)
    _, _, terms = observe(record, router, x_TD, flow_of(rows_of([17], pads=3), double=True))
    logits_TE = (x_TD @ router.weight.T)[:17]
    expected_TE = 2 / 17 * logits_TE.logsumexp(1, keepdim=True) * logits_TE.softmax(1)
    (dx_TD,) = torch.autograd.grad(terms["z"], x_TD)
    torch.testing.assert_close(dx_TD[:17], expected_TE @ router.weight)
    assert (dx_TD[17:] == 0).all()


@pytest.mark.parametrize("name", SCORES)
def test_one_sequence_is_the_micro_batch_and_one_micro_batch_is_the_step(name: str) -> None:
    """Bit for bit, in value and gradient."""
    record = moe_of(*(Aux(over=over) for over in OVER), **SCORES[name])
    router, x_TD = router_of(record.router), drawn(30)
    _, _, terms = observe(record, router, x_TD, flow_of(rows_of([27], pads=3)))
    micro, sequence, step = terms.values()
    assert torch.equal(micro, sequence) and torch.equal(micro, step)
    grads = [torch.autograd.grad(v, x_TD, retain_graph=True)[0] for v in terms.values()]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def step_gradient(
    record: Moe,
    router: TopKRouter,
    batches: Sequence[tuple[Tensor, MicroBatch]],
    double: bool = True,
) -> Tensor:
    """Return the router's gradient of a step made of the balance terms alone."""
    router.weight.grad = None
    balance = Balance(record)
    balance.start_step()
    valid = sum(rows.n_valid for _, rows in batches)
    for x_TD, rows in batches:
        _, _, terms = observe(record, router, x_TD, flow_of(rows, double=double), balance)
        value = sum(balance.coefficients[name] * v for name, v in terms.items())
        (value * (rows.n_valid / valid)).backward()
    return router.weight.grad.clone()


@pytest.mark.parametrize("term", ALL, ids=lambda t: getattr(t, "over", t.kind))
@pytest.mark.parametrize("times", [2, 4])
def test_repeating_a_micro_batch_changes_no_gradient(term: Record, times: int) -> None:
    """The term is neither multiplied nor divided by the number of micro-batches."""
    record = moe_of(term)
    router = router_of(record.router, double=True)
    batch = (drawn(16, double=True).detach(), rows_of([9, 4], pads=3))
    once = step_gradient(record, router, [batch])
    assert once.abs().max() > 1e-4
    many = step_gradient(record, router, [batch] * times)
    torch.testing.assert_close(many, once, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("term", [Aux(over="sequence"), Z()], ids=["sequence", "z"])
def test_terms_without_a_joint_population_do_not_see_micro_batches(term: Record) -> None:
    """Four sequences at once, or one at a time: the same gradient."""
    record = moe_of(term)
    router = router_of(record.router, double=True)
    x_TD = drawn(20, double=True).detach()
    lengths = [7, 2, 6, 5]
    one = [(x, rows_of([n])) for x, n in zip(x_TD.split(lengths), lengths, strict=True)]
    apart = step_gradient(record, router, one)
    together = step_gradient(record, router, [(x_TD, rows_of(lengths))])
    torch.testing.assert_close(apart, together, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("term", ALL, ids=lambda t: getattr(t, "over", t.kind))
def test_a_term_reaches_the_router_in_proportion_to_its_coefficient(term: Record) -> None:
    """Without any other loss the router's gradient is not zero, and doubles exactly."""
    router = router_of(moe_of(term).router)
    batch = (drawn(16).detach(), rows_of([9, 4], pads=3))
    doubled = term.model_copy(update={"coefficient": 2 * term.coefficient})
    one, two = (step_gradient(moe_of(t), router, [batch], double=False) for t in (term, doubled))
    assert one.abs().max() > 1e-6
    assert torch.equal(two, 2 * one)


def test_a_coefficient_of_zero_is_a_term_that_is_not_there() -> None:
    """No value, no node in the graph, nothing counted for it; nor is there one outside training."""
    silent = moe_of(*(Aux(over=over, coefficient=0.0) for over in OVER), Z(coefficient=0.0))
    router, flow = router_of(silent.router), flow_of(rows_of([12]))
    balance = Balance(silent)
    assert balance.coefficients == {}
    _, decision, terms = observe(silent, router, drawn(12), flow, balance)
    assert terms == {} and decision.counts == {}
    loud = moe_of(*ALL)
    assert set(Balance(loud).coefficients) == {f"aux_{over}" for over in OVER} | {"z"}
    quiet = flow_of(rows_of([12]), training=False)
    assert observe(loud, router, drawn(12), quiet)[2] == {}
    assert observe(moe_of(), router, drawn(12), flow)[2] == {}


def test_layers_that_collapse_differently_do_not_cancel() -> None:
    """Layer 0 sends all to expert 0, layer 1 all to expert 1: both are fully collapsed."""
    record = moe_of(Aux(), experts=2, top_k=1, renormalise=False)
    total = 0.0
    for expert in range(2):
        router = router_of(record.router, hidden=2)
        x_TD = one_hot_rows(router, [expert], 10, 200.0)
        _, _, terms = observe(record, router, x_TD, flow_of(rows_of([10])))
        total += float(terms["aux_micro_batch"].detach())
    assert total == 2 * 2.0


@pytest.mark.parametrize("over", OVER)
def test_the_load_is_counted_before_drops_bias_and_groups(over: Any) -> None:
    """A capacity of one token per expert changes neither value nor gradient, nor do the others."""
    x_TD, flow = drawn(40), flow_of(rows_of([30, 10]))
    plain = moe_of(Aux(over=over), score="sigmoid")
    tight = moe_of(Aux(over=over), score="sigmoid", capacity=Capacity(factor=0.1))
    moved = moe_of(
        Aux(over=over), score="sigmoid", selection_bias=True, groups=Groups(count=4, keep=2)
    )
    results = []
    for record in (plain, tight, moved):
        router = router_of(record.router, capacity=record.capacity)
        if router.selection_bias is not None:
            router.selection_bias.copy_(torch.tensor([9.0, 0, 9, 0, 0, 0, 0, 0]))
        routed, _, terms = observe(record, router, x_TD, flow)
        (value,) = terms.values()
        results.append((routed, value, torch.autograd.grad(value, router.weight)[0]))
    assert int(results[1][0].counts_E.max()) == 1
    assert results[2][0].counts_E.tolist()[0] == 40
    for _, value, grad in results[1:]:
        assert torch.equal(value, results[0][1]) and torch.equal(grad, results[0][2])


def test_sequences_of_a_pack_are_told_apart() -> None:
    """A pack of lengths 5, 3, 1 equals the three alone, weighed by their tokens."""
    record = moe_of(Aux(over="sequence", coefficient=1.0))
    router = router_of(record.router, double=True)
    x_TD, lengths = drawn(9, double=True), [5, 3, 1]
    flow = flow_of(rows_of(lengths), double=True)
    packed = observe(record, router, x_TD, flow)[2]["aux_sequence"]
    (dpacked_TD,) = torch.autograd.grad(packed, x_TD)
    alone, dalone = torch.zeros((), dtype=torch.float64), []
    for x, n in zip(x_TD.detach().split(lengths), lengths, strict=True):
        padded = torch.cat((x, torch.full((5 - n, 6), 7.0, dtype=x.dtype))).requires_grad_()
        flow = flow_of(rows_of([n], pads=5 - n), double=True)
        value = observe(record, router, padded, flow)[2]["aux_sequence"] * n / 9
        (grad,) = torch.autograd.grad(value, padded)
        alone += value.detach()
        dalone.append(grad[:n])
    torch.testing.assert_close(packed.detach(), alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(dpacked_TD, torch.cat(dalone), rtol=1e-12, atol=1e-16)
    one = observe(record, router, x_TD, flow_of(rows_of([9]), double=True))[2]["aux_sequence"]
    assert abs(float((one - packed).detach())) > 1e-3


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4).filter(lambda n: sum(n) >= 16),
    pads=st.integers(1, 20),
    name=st.sampled_from(sorted(SCORES)),
    poison=st.sampled_from([0.0, float("nan"), float("inf")]),
    factor=st.sampled_from([None, 0.5]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_padding_changes_no_bit_of_terms_gradients_and_counters(
    lengths: list[int], pads: int, name: str, poison: float, factor: float | None
) -> None:
    """Masking equals shortening, whatever stands in the rows that are masked."""
    capacity = None if factor is None else Capacity(factor=factor)
    record = moe_of(*ALL, capacity=capacity, **SCORES[name])
    router = router_of(record.router, capacity=capacity)
    total = sum(lengths)
    x_TD = drawn(total + pads).detach()
    x_TD[total:] = poison
    results = []
    for rows, extra in ((total + pads, pads), (total, 0)):
        balance, part_TD = Balance(record), x_TD[:rows].clone().requires_grad_()
        flow = flow_of(rows_of(lengths, pads=extra))
        _, decision, terms = observe(record, router, part_TD, flow, balance)
        grads = [torch.autograd.grad(v, part_TD, retain_graph=True)[0] for v in terms.values()]
        assert all((g[total:] == 0).all() for g in grads)
        dweight_ED = torch.autograd.grad(sum(terms.values()), router.weight)[0]
        assert torch.isfinite(dweight_ED).all()
        counters = balance.counters.buffers()
        so_far = decision.counts["global_batch"]
        head = [*terms.values(), *(g[:total] for g in grads), *counters, so_far]
        results.append((head, dweight_ED))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    # A sum over rows in the order of a matrix product: the last bits.
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_valid_token_gives_zero_and_a_gradient_of_zeros(rows: int) -> None:
    """Not NaN, and not None."""
    record = moe_of(*ALL)
    router, x_TD = router_of(record.router), drawn(rows)
    _, _, terms = observe(record, router, x_TD, flow_of(rows_of([], pads=rows)))
    assert [float(v.detach()) for v in terms.values()] == [0.0] * 4
    sum(terms.values()).backward()
    assert (router.weight.grad == 0).all() and (x_TD.grad == 0).all()


# What is counted, and when


def layer(
    record: Moe, router: TopKRouter, balance: Balance
) -> tuple[Callable[[Tensor, MicroBatch], Tensor], dict[str, Decision]]:
    """Return a routing layer that keeps its decision, and the store it keeps it in."""
    store: dict[str, Decision] = {}

    def run(x_TD: Tensor, rows: MicroBatch) -> Tensor:
        flow = flow_of(rows)
        routed = router(x_TD, flow, store.get("layer"))
        store["layer"], terms = balance(routed, flow)
        return routed.weights_TK.square().sum() + sum(terms.values())

    return run, store


@pytest.mark.parametrize("changes", [{}, {"groups": Groups(count=4, keep=2)}], ids=["", "groups"])
def test_a_rerun_counts_the_same_choices_for_the_terms(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits tie; noise in the rerun would choose, and weigh, others."""
    record = moe_of(*ALL, **changes)
    router, rows = router_of(record.router), rows_of([20, 10], pads=2)
    torch.nn.init.zeros_(router.weight)
    x_TD = drawn(32)
    kept, _ = layer(record, router, Balance(record))
    expected = torch.autograd.grad(kept(x_TD, rows), router.weight)[0]
    rerun, store = layer(record, router, Balance(record))
    exact = router._logits

    def noisy(x_TD: Tensor, flow: Flow) -> Tensor:
        logits_TE = exact(x_TD, flow)
        return logits_TE + 1e-6 * torch.randn_like(logits_TE) if store else logits_TE

    monkeypatch.setattr(router, "_logits", noisy)
    value = checkpoint(rerun, x_TD, rows, use_reentrant=False)
    again = torch.autograd.grad(value, router.weight)[0]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_the_step_so_far_is_the_one_of_the_first_run() -> None:
    """A later micro-batch that was counted before the rerun does not enter its value."""
    record = moe_of(Aux(over="global_batch"))
    router, balance = router_of(record.router), Balance(record)
    flow = flow_of(rows_of([20]))
    x_TD, later_TD = drawn(20, seed=1), drawn(20, seed=2)
    _, decision, terms = observe(record, router, x_TD, flow, balance)
    observe(record, router, later_TD, flow, balance)
    _, again = balance(router(x_TD, flow, decision), flow)
    assert torch.equal(again["aux_global_batch"], terms["aux_global_batch"])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_rerun_counts_nothing(recompute: bool) -> None:
    """The counters hold tokens times K after any number of runs."""
    record = moe_of(*ALL, Bias(), selection_bias=True)
    router, balance = router_of(record.router), Balance(record)
    rows = rows_of([13, 4], pads=3)
    run, store = layer(record, router, balance)
    x_TD = drawn(20)
    if recompute:
        checkpoint(run, x_TD, rows, use_reentrant=False).backward()
    else:
        run(x_TD, rows).backward()
    assert store["layer"].counts is not None
    counters = balance.counters
    assert int(counters.load_E.sum()) == int(counters.plain_E.sum()) == 17 * 2
    assert int(counters.tokens) == 17
    assert float(counters.probability_E.sum()) == pytest.approx(17, rel=1e-6)


def test_a_foreign_decision_is_counted_once() -> None:
    """A recorded decision that no counter has seen yet counts, and its plain top-k is our own."""
    record = moe_of(Aux(), Bias(), selection_bias=True)
    router, balance = router_of(record.router), Balance(record)
    flow, x_TD = flow_of(rows_of([10])), drawn(10)
    foreign = Decision(torch.tensor([[7, 6]]).expand(10, 2).contiguous())
    decision, _ = balance(router(x_TD, flow, foreign), flow)
    balance(router(x_TD, flow, decision), flow)
    assert balance.counters.load_E.tolist() == [0] * 6 + [10, 10]
    own = router(x_TD, flow).scores_TE.topk(2, dim=1).indices
    assert torch.equal(decision.plain_TK, own)


def test_one_update_per_step_from_the_whole_batch() -> None:
    """Three micro-batches with an evaluation between them move the bias once, by hand's values."""
    record = moe_of(Bias(rate=0.01), selection_bias=True, score="sigmoid")
    router, balance = router_of(record.router), Balance(record)
    router.selection_bias.zero_()
    hands = torch.zeros(8)
    for step in range(2):
        balance.start_step()
        counts = torch.zeros(8, dtype=torch.int64)
        before = router.selection_bias.clone()
        for j in range(3):
            rows = rows_of([10 + j], pads=j)
            x_TD = drawn(rows.rows, seed=10 * step + j)
            routed, _, _ = observe(record, router, x_TD, flow_of(rows), balance)
            counts += routed.counts_E
            quiet = flow_of(rows_of([50]), training=False)
            observe(record, router, drawn(50, seed=99), quiet, balance)
            assert torch.equal(router.selection_bias, before)
        assert torch.equal(balance.counters.load_E, counts)
        balance.finish_step(router)
        hands = hands + 0.01 * torch.sign(counts.double().mean() - counts).float()
        assert torch.equal(router.selection_bias, hands)
        assert router.selection_bias.abs().max() > 0


def test_an_evaluation_alone_moves_nothing() -> None:
    """Nothing was counted, so nothing is above or below the mean."""
    record = moe_of(Bias(), selection_bias=True)
    router, balance = router_of(record.router), Balance(record)
    before = router.selection_bias.clone()
    balance.start_step()
    observe(record, router, drawn(50), flow_of(rows_of([50]), training=False), balance)
    balance.finish_step(router)
    assert torch.equal(router.selection_bias, before)
    assert int(balance.counters.tokens) == 0


def test_a_frozen_router_keeps_its_bias() -> None:
    """A weight that wants no gradient freezes the bias with it."""
    record = moe_of(Bias(), selection_bias=True)
    router, balance = router_of(record.router), Balance(record)
    before = router.selection_bias.clone()
    router.weight.requires_grad_(False)
    observe(record, router, drawn(50), flow_of(rows_of([50])), balance)
    balance.finish_step(router)
    assert torch.equal(router.selection_bias, before)
    router.weight.requires_grad_(True)
    balance.finish_step(router)
    assert not torch.equal(router.selection_bias, before)


def test_the_update_counts_choices_before_drops() -> None:
    """Capacity evens out what is sent; the bias must see what was asked for."""
    record = moe_of(Bias(), selection_bias=True, capacity=Capacity(factor=0.5))
    router, balance = router_of(record.router, capacity=record.capacity), Balance(record)
    routed, _, _ = observe(record, router, drawn(64), flow_of(rows_of([60], pads=4)), balance)
    counters = balance.counters
    assert int(counters.load_E.sum()) == 120
    assert torch.equal(counters.sent_E, routed.counts_E)
    assert int(counters.sent_E.max()) == 8 and int(counters.load_E.max()) > 8


@pytest.mark.parametrize("cast", ["to", "half", "bfloat16", "type"])
def test_counts_that_differ_by_one_move_the_bias_apart(cast: str) -> None:
    """40,841 and 40,840 are the same number in bfloat16 and half."""
    record = moe_of(Bias(rate=1e-3), experts=2, top_k=1, renormalise=False, selection_bias=True)
    model = torch.nn.ModuleDict(
        {"router": TopKRouter(record.router, 4), "balance": Balance(record)}
    )
    balance, router = model["balance"], model["router"]
    if cast in ("to", "type"):
        getattr(model, cast)(torch.bfloat16)
    else:
        getattr(model, cast)()
    balance.start_step()
    for name, buffer in balance.counters.named_buffers():
        assert buffer.dtype == (torch.float32 if name == "probability_E" else torch.int64)
    balance.counters.load_E.copy_(torch.tensor([40_841, 40_840]))
    balance.finish_step(router)
    assert router.selection_bias.dtype == torch.float32
    assert router.selection_bias.tolist() == [pytest.approx(-1e-3), pytest.approx(1e-3)]


def test_counters_start_each_step_from_zero_and_are_not_saved() -> None:
    """A checkpoint is made between steps."""
    record = moe_of(*ALL)
    router, balance = router_of(record.router), Balance(record)
    observe(record, router, drawn(10), flow_of(rows_of([10])), balance)
    assert int(balance.counters.load_E.sum()) == 20
    balance.start_step()
    assert all((b == 0).all() for b in balance.counters.buffers())
    assert balance.state_dict() == {}


def test_health_says_how_experts_are_used() -> None:
    """By hand: 60 tokens, one expert with 30 choices, one with 10, two dead ones, 8 dropped."""
    record = moe_of(Bias(), experts=4, top_k=1, renormalise=False, selection_bias=True)
    router, balance = router_of(record.router), Balance(record)
    router.selection_bias.copy_(torch.tensor([0.5, -0.25, 0.0, 0.0]))
    counters = balance.counters
    counters.load_E.copy_(torch.tensor([30, 10, 0, 0]))
    counters.sent_E.copy_(torch.tensor([22, 10, 0, 0]))
    counters.probability_E.copy_(torch.tensor([20.0, 20.0, 0.0, 0.0]))
    figures = {k: v.tolist() for k, v in balance.health(router).items()}
    assert figures == {
        "load": [0.75, 0.25, 0.0, 0.0],
        "load_max_over_mean": 3.0,
        "dead_experts": 2,
        "load_entropy": pytest.approx(0.8112781 / 2, rel=1e-6),
        "probability_entropy": pytest.approx(0.5, rel=1e-6),
        "drop_rate": pytest.approx(0.2),
        "bias_range": 0.75,
    }
    balance.start_step()
    silent = {k: v.tolist() for k, v in balance.health(router).items() if k != "load"}
    assert silent["drop_rate"] == 0 and silent["load_entropy"] == 0 and silent["dead_experts"] == 4


# Parts from outside, and sums


class Spread(Record):
    """A term that a user brings along."""

    kind: Literal["test_spread"] = "test_spread"
    coefficient: float = 0.5


class SpreadTerm(Term):
    """Mean square of the distribution."""

    def __init__(self, record: Spread) -> None:
        self.name, self.coefficient = "spread", record.coefficient

    def __call__(self, observed: Observed) -> Tensor:
        """Return the mean over valid tokens."""
        return observed.mean(observed.probability_TE.square().sum(1))


def test_a_term_from_outside_is_one_record_and_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """And something that is neither a term nor an update is refused."""
    monkeypatch.setitem(BALANCE.kinds, "test_spread", Spread)
    Spread.owner = SpreadTerm
    record = moe_of(Spread())
    router, flow = router_of(record.router), flow_of(rows_of([10], pads=2))
    routed, _, terms = observe(record, router, drawn(12), flow)
    expected = routed.scores_TE[:10].square().sum(1).mean()
    torch.testing.assert_close(terms["spread"].float(), expected)
    Spread.owner = dict
    with pytest.raises(TypeError, match="neither a balance Term nor an Update"):
        Balance(record)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_sums_and_counts_by_population_equal_loops(data: st.DataObject) -> None:
    """Any number of rows in any order; gradients too."""
    rows, populations = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, populations - 1), min_size=rows, max_size=rows)
    population = data.draw(numbers)
    population_T = torch.tensor(population, dtype=torch.int64)
    given_T = None if populations == 1 else population_T
    values_TE = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    experts_TK = torch.rand(rows, 4).argsort(dim=1)[:, :2]
    sums_NE = sum_rows(values_TE, given_T, populations)
    counts_NE = count_choices(experts_TK, given_T, populations, 4)
    for n in range(populations):
        mine = [t for t in range(rows) if population[t] == n]
        expected_E = values_TE[mine].sum(0)
        torch.testing.assert_close(sums_NE[n], expected_E, rtol=1e-12, atol=1e-12)
        picks = experts_TK[mine].flatten().tolist()
        assert counts_NE[n].tolist() == [picks.count(e) for e in range(4)]
    factor_NE = torch.randn(populations, 4, dtype=torch.float64)
    (grad_TE,) = torch.autograd.grad((sums_NE * factor_NE).sum(), values_TE)
    assert torch.equal(grad_TE, factor_NE[population_T])


def test_nothing_asks_the_device_for_a_number() -> None:
    """On the meta device, where no number exists, a whole step runs."""
    record = moe_of(
        *ALL,
        Bias(),
        capacity=Capacity(factor=0.9),
        selection_bias=True,
        groups=Groups(count=4, keep=2),
    )
    with torch.device("meta"):
        router, balance = TopKRouter(record.router, 6, record.capacity), Balance(record)
    rows = replace(rows_of([11, 5], pads=4)).to("meta")
    x_TD = torch.randn(20, 6, device="meta", requires_grad=True)
    balance.start_step()
    routed, _, terms = observe(record, router, x_TD, flow_of(rows), balance)
    (routed.weights_TK.sum() + sum(terms.values())).backward()
    balance.finish_step(router)
    assert router.weight.grad.shape == (8, 6) and x_TD.grad.shape == (20, 6)
    assert balance.health(router)["load"].shape == (8,)
