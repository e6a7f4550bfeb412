"""Routers that choose by more than a row's scores, and what is drawn by chance."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.errors import REMOVE
from moefold.config.slot import build
from moefold.layers.flow import Flow
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block
from moefold.moe.balance import Balance
from moefold.moe.config import (
    Bias,
    Capacity,
    ExpertChoice,
    Groups,
    Hash,
    Idle,
    IdleRouter,
    Moe,
    Quantile,
    RoundRobin,
    Router,
    Shared,
    Sinkhorn,
)
from moefold.moe.dispatch.config import LocalExperts
from moefold.moe.layer import MoeFfn
from moefold.moe.router import Routed
from moefold.moe.rows import MoeInput
from moefold.moe.topk import count
from tests.cpu.routing import drawn, flow_of, observe, rows_of

EXPERTS, ROWS = 8, 160
QUANTILE = Quantile(rate=1.0)
GQA = Gqa(heads=2, kv_heads=2, head_dim=4)
SMALL = Router(experts=EXPERTS, top_k=2)
BIASED = SMALL.model_copy(update={"selection_bias": True})
IDLE = IdleRouter(experts=EXPERTS, top_k=2)
TWO_WAY = Shared(width=8, gate=True, two_way=True)
EAGER = BIASED.model_copy(update={"top_k": EXPERTS})
CHOICE = ExpertChoice(experts=EXPERTS, top_k=2)


def made(record: Router, capacity: Capacity | None = None, layer: int = 0) -> Any:
    """Return a router that likes the first experts."""
    router = build(record, 6, capacity).double()
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(router.weight, generator=generator)
    with torch.no_grad():
        router.weight[:, 0] += torch.linspace(3, 0, EXPERTS)
    router.layer = layer
    return router


def flow(ids_T: Tensor | None = None, training: bool = True, step: int = 0) -> Flow:
    rows = rows_of((ROWS,), pads=3)
    if ids_T is not None:
        rows.ids_T[:ROWS] = ids_T
    made = flow_of(rows, double=True, training=training)
    made.precision_policy.step = step
    return made


def loads(routed: Routed) -> list[int]:
    return count(routed.decision.experts_TK, EXPERTS).tolist()


def tilted() -> Tensor:
    """Return rows of which all want the same experts, more or less."""
    x_TD = drawn(ROWS + 3, double=True).detach()
    x_TD[:, 0] = x_TD[:, 0].abs() + 1
    return x_TD


@pytest.mark.parametrize("order", ("score_first", "topk_first"))
def test_sinkhorn_spreads_tokens_in_training_alone(order: Any) -> None:
    sizes: dict[str, Any] = {"experts": EXPERTS, "top_k": 2, "order": order}
    plain, scaled = made(Router(**sizes)), made(Sinkhorn(**sizes, rounds=32))
    x_TD = tilted()
    assert max(loads(plain(x_TD, flow()))) > 120
    assert max(loads(scaled(x_TD, flow()))) < 60 and min(loads(scaled(x_TD, flow()))) > 20
    asleep = flow(training=False)
    one, other = (each(x_TD, asleep).decision.experts_TK for each in (plain, scaled))
    assert torch.equal(one, other)


def test_hash_chooses_by_the_token_and_the_layer() -> None:
    ids_T = torch.arange(ROWS) % 40
    record = Hash(experts=EXPERTS, top_k=2)
    first, second = (made(record, layer=layer) for layer in (0, 1))
    x_TD = drawn(ROWS + 3, double=True)
    chosen_TK = first(x_TD, flow(ids_T)).decision.experts_TK
    assert torch.equal(chosen_TK[:40], chosen_TK[40:80])
    assert (chosen_TK[:ROWS, 0] != chosen_TK[:ROWS, 1]).all() and (
        chosen_TK[ROWS:] == EXPERTS
    ).all()
    assert torch.equal(chosen_TK, first(x_TD.flip(0), flow(ids_T, step=5)).decision.experts_TK)
    assert not torch.equal(chosen_TK, second(x_TD, flow(ids_T)).decision.experts_TK)
    many = first(x_TD, flow(torch.arange(ROWS)))
    assert min(loads(many)) > 20  # of a mean of 40
    many.weights_TK.square().sum().backward()
    assert first.weight.grad.norm() > 0  # scores weigh, and learn


def test_a_skew_gives_some_experts_more_others_in_each_layer() -> None:
    record = RoundRobin(experts=EXPERTS, top_k=2, skew=1.0)
    x_TD, seen = tilted(), []
    for layer in (0, 1):
        routed = [made(record, layer=layer)(x_TD, flow()) for _ in range(2)]
        first_TK, second_TK = (one.decision.experts_TK for one in routed)
        assert torch.equal(first_TK, second_TK)
        assert (first_TK[:ROWS, 0] != first_TK[:ROWS, 1]).all()
        seen.append(torch.tensor(loads(routed[0])))
        assert seen[-1].max() > 2 * seen[-1].min() and seen[-1].sum() == 2 * ROWS
    assert (seen[0] - seen[1]).abs().max() > 20


def test_round_robin_gives_all_experts_as_many() -> None:
    router = made(RoundRobin(experts=EXPERTS, top_k=2))
    assert loads(router(tilted(), flow())) == [ROWS * 2 // EXPERTS] * EXPERTS


def test_any_token_is_dropped_the_same_ones_in_a_second_run() -> None:
    """Neither the first nor the likeliest stay more often than others; each step drops anew."""
    sizes: dict[str, Any] = {"experts": EXPERTS, "top_k": 2}
    router = made(Router(**sizes), Capacity(factor=0.5, drop="random"))
    other = made(Router(**sizes), Capacity(factor=0.5, drop="random"), layer=1)
    x_TD, kept = tilted(), []
    for step in range(64):
        routed = router(x_TD, flow(step=step))
        sent = count(routed.sent_TK, EXPERTS)
        assert sent.max() == 20 and torch.equal(
            routed.sent_TK, router(x_TD, flow(step=step)).sent_TK
        )
        kept.append(routed.decision.kept_TK)
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], other(x_TD, flow()).decision.kept_TK)
    first_T = torch.stack(kept)[:, :ROWS, 0].double().mean((0,))
    early, late = first_T[: ROWS // 2].mean(), first_T[ROWS // 2 :].mean()
    assert abs(float(early / late) - 1) < 0.2


def test_jitter_is_of_the_step_and_the_row_and_of_training_alone() -> None:
    sizes: dict[str, Any] = {"experts": EXPERTS, "top_k": 2}
    plain, shaken = made(Router(**sizes)), made(Router(**sizes, jitter=0.25))
    x_TD = drawn(ROWS + 3, double=True)
    asleep = flow(training=False)
    assert torch.equal(plain(x_TD, asleep).logits_TE, shaken(x_TD, asleep).logits_TE)
    logits_TE = shaken(x_TD, flow()).logits_TE
    assert torch.equal(logits_TE, shaken(x_TD, flow()).logits_TE)
    assert not torch.equal(logits_TE, shaken(x_TD, flow(step=1)).logits_TE)
    # The factors are read off rows of ones, through a weight that passes one feature on.
    with torch.no_grad():
        shaken.weight.copy_(torch.eye(EXPERTS, 6))
    factors = shaken(torch.ones(ROWS + 3, 6).double(), flow()).logits_TE[:ROWS, :6].detach()
    assert 0.75 <= factors.min() < 0.76 and 1.24 < factors.max() <= 1.25
    assert abs(float(factors.mean()) - 1) < 0.02 and factors.unique().numel() > 0.9 * ROWS * 6
    # The gradient goes through the same factors, drawn again.
    x_TD.grad = None
    shaken(x_TD, flow()).logits_TE[:ROWS].sum().backward()
    assert x_TD.grad is not None and torch.allclose(x_TD.grad[:ROWS], factors)


def chosen_by_loop(scores: list[list[float]], taken: int, most: int) -> list[set[int]]:
    """Return each token's experts where each expert takes the best tokens, earliest first."""
    tokens, experts = range(len(scores)), range(len(scores[0]))
    found: list[set[int]] = [set() for _ in tokens]
    for e in experts:
        for t in sorted(tokens, key=lambda t: (-scores[t][e], t))[:taken]:
            found[t].add(e)
    return [
        set(sorted(one, key=lambda e: (-scores[t][e], e))[:most]) for t, one in enumerate(found)
    ]


@pytest.mark.parametrize("most", (0, 2))
def test_experts_choose_their_tokens(most: int) -> None:
    """All have as many; what a token is not chosen by weighs nothing, padding is chosen by none."""
    router = made(ExpertChoice(experts=EXPERTS, top_k=2, most=most))
    x_TD = tilted()
    routed = router(x_TD, flow())
    chosen_TK = routed.decision.experts_TK
    assert chosen_TK.shape[1] == (most or EXPERTS) and (chosen_TK[ROWS:] == EXPERTS).all()
    wanted = chosen_by_loop(routed.scores_TE[:ROWS].tolist(), ROWS * 2 // EXPERTS, most or EXPERTS)
    assert [set(one) - {EXPERTS} for one in chosen_TK[:ROWS].tolist()] == wanted
    assert (routed.weights_TK[chosen_TK == EXPERTS] == 0).all()
    assert most or loads(routed) == [ROWS * 2 // EXPERTS] * EXPERTS
    # Where there may be no later tokens each chooses for itself.
    alone = router(x_TD, flow(training=False)).decision.experts_TK
    plain = made(Router(experts=EXPERTS, top_k=2, renormalise=False))
    assert torch.equal(alone, plain(x_TD, flow(training=False)).decision.experts_TK)


def test_quantiles_give_each_expert_its_share() -> None:
    """One step asks for the order statistic; a few of the whole rate make loads even."""
    record = Router(experts=EXPERTS, top_k=2, selection_bias=True)
    router, balance = made(record), Balance(Moe(width=4, router=record, balance=(QUANTILE,)))
    x_TD, spread = tilted(), list[int]()
    for step in range(12):
        balance.start_step()
        routed, _, _ = observe(balance.record, router, x_TD, flow(), balance)
        assert router.selection_bias is not None
        biased_TE = routed.scores_TE[:ROWS] + router.selection_bias
        next_T1 = biased_TE.sort(dim=1, descending=True).values[:, 2:3]
        over_TE = (routed.scores_TE[:ROWS] - next_T1).sort(dim=0, descending=True).values
        balance.finish_step(router)
        wanted_E = -over_TE[ROWS * 2 // EXPERTS]
        assert (router.selection_bias - wanted_E).abs().max() < 1e-6, step
        spread.append(max(loads(routed)) - min(loads(routed)))
    assert spread[0] > 90 and spread[-1] < 12


def test_idle_experts_add_what_they_are() -> None:
    """A mixture whose experts give nothing adds shares of the row, and learned rows."""
    idle = Idle(identity=2, constant=2, zero=1)
    record = IdleRouter(experts=4, top_k=3, idle=idle)
    mixture = MoeFfn(Moe(width=4, router=record), 6, 0, LocalExperts(), "loop").double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        mixture.experts.w_out.zero_()
    assert mixture.idle is not None and mixture.idle.constant_bias is not None
    x_TD = drawn(ROWS + 3, double=True).detach()
    rows = flow()
    routed = mixture.router(x_TD, rows)
    added_TD = mixture(MoeInput(torch.zeros_like(x_TD), x_TD), rows).x_TD
    given = mixture.idle.constant_bias.unbind(1)
    for t in range(ROWS):
        wanted_D = torch.zeros(6).double()
        for e, w in zip(routed.sent_TK[t].tolist(), routed.weights_TK[t], strict=True):
            row_D = x_TD[t] if e in (4, 5) else given[e - 6] if e in (6, 7) else 0
            wanted_D = wanted_D + w * row_D
        assert torch.allclose(added_TD[t], wanted_D)
    assert (added_TD[ROWS:] == 0).all()
    load_E = mixture.balance.counters.load_E
    assert load_E.sum() == 3 * ROWS and (load_E[4:] > 0).all()


def test_a_router_of_one_expert_and_one_that_is_idle_learns() -> None:
    """A softmax over the expert alone is always 1, but not beside a choice that gives nothing."""
    alone = Router(experts=1, top_k=1, renormalise=False)
    beside = IdleRouter(experts=1, top_k=1, renormalise=False, idle=Idle(zero=1))
    named = [[*Moe(width=4, router=one).without_gradient()] for one in (alone, beside)]
    assert [bool(names) for names in named] == [True, False]


def test_rows_of_a_latent_mixture_are_narrow_between_two_projections() -> None:
    """The sum of the experts' results is widened, not each of them; the gate shares both out."""
    shared = Shared(width=5, gate=True, two_way=True)
    record = Moe(width=4, latent=3, shared=shared, router=Router(experts=4, top_k=2))
    mixture = MoeFfn(record, 6, 0, LocalExperts(), "loop").double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert mixture.down is not None and mixture.up is not None and mixture.shared is not None
    x_TD, rows = drawn(ROWS, double=True).detach(), flow_of(rows_of((ROWS,)), double=True)
    routed = mixture.router(x_TD, rows)
    sent_TL, sums_TL = x_TD @ mixture.down.weight.T, torch.zeros(ROWS, 3).double()
    for e, (w_in, w_out) in enumerate(
        zip(mixture.experts.w_in, mixture.experts.w_out, strict=True)
    ):
        gate_TF, up_TF = sent_TL @ w_in[0].T, sent_TL @ w_in[1].T
        weight_T1 = torch.where(routed.sent_TK == e, routed.weights_TK, 0).sum(1, keepdim=True)
        sums_TL = sums_TL + weight_T1 * ((F.silu(gate_TF) * up_TF) @ w_out.T)
    assert mixture.shared.gate is not None
    share_T1 = (x_TD @ mixture.shared.gate.weight.T).sigmoid()
    wanted_TD = (1 - share_T1) * (sums_TL @ mixture.up.weight.T) + mixture.shared(x_TD, rows)
    found_TD = mixture(MoeInput(torch.zeros_like(x_TD), x_TD), rows).x_TD
    assert torch.allclose(found_TD, wanted_TD)


@pytest.mark.parametrize(
    ("where", "nearest", "record"),
    [
        ("gate", True, Shared(width=8, two_way=True)),
        ("weigh", "output", Moe(width=8, router=SMALL, weigh="input", shared=TWO_WAY)),
        ("renormalise", False, ExpertChoice(experts=8, top_k=2, renormalise=True)),
        ("most", 8, ExpertChoice(experts=8, top_k=2, most=9)),
        ("identity", 1, Idle()),
        ("groups", None, IDLE.model_copy(update={"groups": Groups(count=4, keep=2)})),
        ("capacity", None, Moe(width=8, router=CHOICE, capacity=Capacity(factor=1.0))),
        ("router.selection_bias", True, Moe(width=8, router=SMALL, balance=(QUANTILE,))),
        ("balance.1", REMOVE, Moe(width=8, router=BIASED, balance=(QUANTILE, Bias()))),
        ("router.top_k", 7, Moe(width=8, router=EAGER, balance=(QUANTILE,))),
        ("norms", "before", Block(attention=GQA, ffn=Moe(width=8, router=IDLE), norms="both")),
    ],
)
def test_what_does_not_fit_a_router_is_refused(where: str, nearest: Any, record: Any) -> None:
    (found,) = record.rules()
    assert (".".join(map(str, found.path)), found.nearest) == (where, nearest)
