"""Routers that choose by more than a row's scores, and what is drawn by chance."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.slot import build
from moefold.layers.flow import Flow
from moefold.moe.config import Capacity, Hash, RoundRobin, Router, Sinkhorn
from moefold.moe.router import Routed
from moefold.moe.topk import count
from tests.cpu.routing import drawn, flow_of, rows_of

EXPERTS, ROWS = 8, 160


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
    made.recipe.step = step
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


def test_round_robin_gives_all_experts_as_many() -> None:
    router = made(RoundRobin(experts=EXPERTS, top_k=2))
    assert loads(router(tilted(), flow())) == [ROWS * 2 // EXPERTS] * EXPERTS


def test_b86_any_token_is_dropped_the_same_ones_in_a_second_run() -> None:
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


def test_b86_jitter_is_of_the_step_and_the_row_and_of_training_alone() -> None:
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
