"""Small routers, rows and straightforward float64 loops that routing tests share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefold.data.batch import MicroBatch, assemble
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.moe.balance import Balance
from moefold.moe.config import Moe, Router
from moefold.moe.router import Decision, Routed, TopKRouter


def rows_of(lengths: Sequence[int], pads: int = 0, first_token: int = 0) -> MicroBatch:
    """Return a micro-batch of segments of the given lengths, then padding rows."""
    rows = sum(lengths) + pads
    ones, token_T = np.ones(sum(lengths), np.int64), np.arange(first_token, first_token + rows)
    return assemble(ones, ones, lengths, rows=rows, token_T=token_T)


def flow_of(rows: MicroBatch, *, training: bool = True, double: bool = False) -> Flow:
    """Return a pass over the rows."""
    return Flow(rows, PrecisionPolicy("fp64" if double else "fp32"), training=training)


def router_of(
    record: Router, hidden: int = 6, *, seed: int = 0, double: bool = False, **more: Any
) -> TopKRouter:
    """Return a router with drawn weights and, where it has one, a drawn selection bias."""
    generator = torch.Generator().manual_seed(seed)
    router = TopKRouter(record, hidden, **more)
    router = router.double() if double else router
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        if router.selection_bias is not None:
            drawn_E = torch.randn(router.selection_bias.shape, generator=generator)
            router.selection_bias.copy_(0.3 * drawn_E)
    return router


def drawn(rows: int, hidden: int = 6, *, seed: int = 1, double: bool = False) -> Tensor:
    """Return drawn rows that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    return torch.randn(rows, hidden, generator=generator, dtype=dtype).requires_grad_()


def observe(
    record: Moe, router: TopKRouter, x_TD: Tensor, flow: Flow, balance: Balance | None = None
) -> tuple[Routed, Decision, dict[str, Tensor]]:
    """Route the rows and return the result, the decision to keep, and each term's value."""
    balance = Balance(record) if balance is None else balance
    routed = router(x_TD, flow)
    decision, terms = balance(routed, flow)
    return routed, decision, terms


def score_by_loop(logits: Sequence[float], kind: str) -> list[float]:
    """Return one row's scores over all experts."""
    if kind == "softmax":
        top = max(logits)
        exps = [math.exp(v - top) for v in logits]
        return [v / sum(exps) for v in exps]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    assert kind == "sqrt_softplus", f"score_by_loop lacks {kind}"
    return [math.sqrt(math.log1p(math.exp(v))) for v in logits]


def route_by_loop(
    logits: Sequence[float], bias: Sequence[float] | None, record: Router
) -> tuple[list[int], list[float]]:
    """Return one row's experts, best first, and their weights."""
    first = record.order == "score_first"
    values = score_by_loop(logits, record.score) if first else list(logits)
    choice = [v + (0.0 if bias is None else bias[e]) for e, v in enumerate(values)]
    allowed = set(range(record.experts))
    if record.groups is not None:
        allowed = _allowed_by_loop(choice, record)
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: record.top_k]
    weights = [values[e] for e in chosen]
    if not first:
        weights = score_by_loop(weights, record.score)
    if record.renormalise and (first or record.score != "softmax"):
        weights = [w / (sum(weights) + record.epsilon) for w in weights]
    return chosen, [w * record.scale for w in weights]


def _allowed_by_loop(choice: Sequence[float], record: Router) -> set[int]:
    groups = record.groups
    assert groups is not None
    size = record.experts // groups.count
    members = [range(g * size, (g + 1) * size) for g in range(groups.count)]
    best = 1 if groups.score == "max" else groups.best
    rank = [sum(sorted((choice[e] for e in m), reverse=True)[:best]) for m in members]
    kept = sorted(range(groups.count), key=lambda g: (-rank[g], g))[: groups.keep]
    return {e for g in kept for e in members[g]}


def distribution_by_loop(logits: Sequence[float], record: Router) -> list[float]:
    """Return one row's distribution over all experts."""
    values = score_by_loop(logits, record.score)
    return [v / sum(values) for v in values]


def drop_by_loop(
    experts: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None,
    token: Sequence[int],
    limit: int,
) -> set[tuple[int, int]]:
    """Return the (row, k) pairs that stay; negative experts are not there at all."""
    places: dict[int, list[tuple[int, int]]] = {}
    for t, row in enumerate(experts):
        for k, e in enumerate(row):
            if e >= 0:
                places.setdefault(e, []).append((t, k))
    stays: set[tuple[int, int]] = set()
    for copies in places.values():

        def key(c: tuple[int, int]) -> tuple[float, int]:
            return (0.0 if weights is None else -weights[c[0]][c[1]], token[c[0]])

        stays.update(sorted(copies, key=key)[:limit])
    return stays
