"""The router: chooses the experts of each token, and computes their weights.

T token rows, D hidden, E experts, K experts per token.

The *decision* (experts and drops) is made once per micro-batch and stored. A recomputed layer
replays it and recomputes only scores and weights, so that the router's gradient is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.collectives import gather, sum_
from moefold.comm.group import Group
from moefold.data.batch import MicroBatch
from moefold.kernels.linear.product import add_bias, linear
from moefold.layers.flow import Flow
from moefold.layers.linear import Adaptable
from moefold.layers.precision import ExactBuffers
from moefold.moe.config import Capacity, Router
from moefold.moe.draws import DROP, make_jitter, uniform
from moefold.moe.scoring import scores, weights
from moefold.moe.topk import capacity_mask, count, require_places, select

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Decision:
    """Routing decision for the rows of a micro-batch: made once, then replayed.

    A decision recorded in another run needs only ``experts_TK``.
    """

    experts_TK: Tensor
    """int64 expert ids, best first, ties by the lowest id; E in rows that are not valid."""
    kept_TK: Tensor | None = None
    """bool, False for copies dropped by capacity and rows that are not valid; None if dropless."""
    plain_TK: Tensor | None = None
    """int64 top-k of plain scores (no bias, no groups), which auxiliary losses count."""
    counts: Mapping[str, Tensor] | None = None
    """int64 [N, E] plain choices by population and expert, over all ranks, for each kind of
    population; None until the layer's counters have counted the decision."""


@dataclass(frozen=True)
class Routed:
    """Result of a router; rows that are not valid have zero logits."""

    decision: Decision
    sent_TK: Tensor
    """int64 expert of each copy to be dispatched; E for dropped copies and rows not valid."""
    weights_TK: Tensor
    """Differentiable weights of the experts' outputs in the scores' dtype; 0 where not sent."""
    logits_TE: Tensor
    scores_TE: Tensor
    bias_E: Tensor | None = None
    """float32 selection bias used in the choice."""

    @cached_property
    def counts_E(self) -> Tensor:
        """int64 number of copies sent to each expert."""
        return count(self.sent_TK, self.scores_TE.shape[1])


@dataclass(frozen=True)
class RoutingContext:
    """Inputs of a router's choice other than scores."""

    record: Router
    bias_E: Tensor | None
    """float32 selection bias; None where the record has none."""
    rows: MicroBatch
    """Rows of this rank, valid ones first."""
    ranks: Group
    """Ranks that share the rows of the micro-batch."""
    training: bool = True
    layer: int = 0

    @property
    def valid_T(self) -> Tensor | None:
        """bool mask of valid rows; None if all are."""
        return None if self.rows.n_valid == self.rows.rows else self.rows.valid_T

    def valid(self, values_TX: Tensor) -> Tensor:
        """Return the valid rows."""
        return values_TX[: self.rows.n_valid]

    def gather(self, rows_TX: Tensor) -> Tensor:
        """All-gather rows over the ranks that share the micro-batch: a collective.

        On one rank it returns the argument itself.
        """
        if self.ranks.size == 1:
            return rows_TX
        return gather(rows_TX, self.ranks).flatten(0, 1)

    def own(self, gathered_TX: Tensor) -> Tensor:
        """Return this rank's rows of a result of :meth:`gather`."""
        return gathered_TX.unflatten(0, (self.ranks.size, -1))[self.ranks.index]

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce values over the ranks that share the micro-batch: a collective."""
        return sum_(values.clone(), self.ranks)


class TopKRouter(ExactBuffers, Adaptable):
    """Top-k router and base of all routers: plug-ins override :meth:`scores` or :meth:`choose`.

    ``weight`` [E, D] is the master parameter. ``selection_bias`` [E], if the record has one, is a
    buffer that stays float32 when the model is cast; it affects choices, never weights.
    """

    def __init__(self, record: Router, hidden: int, capacity: Capacity | None = None) -> None:
        super().__init__()
        self.record = record
        self.capacity = capacity
        self.layer = 0
        choices = record.choices
        self.weight = nn.Parameter(torch.empty(choices, hidden))
        self.bias = nn.Parameter(torch.empty(choices)) if record.bias else None
        bias_E = torch.zeros(choices, dtype=torch.float32) if record.selection_bias else None
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", bias_E)

    def forward(self, x_TD: Tensor, flow: Flow, decision: Decision | None = None) -> Routed:
        """Route the rows; a ``decision`` to replay supplies choices and drops.

        For non-finite logits in valid rows the choice is arbitrary but deterministic.
        """
        logits_TE = self._logits(x_TD, flow)
        scores_TE = self.scores(logits_TE)
        fresh = decision is None
        decision = decision or self._decide(scores_TE, flow)
        weights_TK = weights(scores_TE, decision.experts_TK, self.record)
        if fresh and self.capacity is not None and not flow.dropless:
            decision = replace(decision, kept_TK=self._drop(decision, weights_TK, flow))
        sent_TK = decision.experts_TK
        experts = self.record.choices
        if decision.kept_TK is not None:
            sent_TK = torch.where(decision.kept_TK, sent_TK, experts)
        if decision.kept_TK is not None or flow.valid_T is not None or self.record.partial:
            weights_TK = torch.where(sent_TK < experts, weights_TK, 0)
        return Routed(decision, sent_TK, weights_TK, logits_TE, scores_TE, self.selection_bias)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores [T, E] by which experts are chosen and weighted."""
        return scores(logits_TE, self.record)

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Return int64 ids [T, K] of the experts, best first; E in rows that are not valid.

        Called once per micro-batch and layer, without gradients.
        """
        return select(
            scores_TE,
            self.record.top_k,
            bias_E=context.bias_E,
            groups=self.record.groups,
            valid_T=context.valid_T,
        )

    def _logits(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return logits [T, E] in the wider of the record's and the rows' dtype."""
        dtype = torch.promote_types(DTYPES[self.record.dtype], x_TD.dtype)
        weight = self.operand("weight", flow, dtype)
        options: dict[str, Any] = {"n_valid": flow.n_valid, "sink": flow.sink}
        if self.record.jitter and flow.training:
            options["transform"] = make_jitter(self.record.jitter, self.layer, flow)
        logits_TE = linear(x_TD, weight, **options)
        if self.bias is not None:
            bias = flow.operand(self.bias, dtype)
            logits_TE = add_bias(logits_TE, bias, n_valid=flow.n_valid, sink=flow.sink)
        if flow.valid_T is None:
            return logits_TE
        # Selection, not multiplication: a NaN in a padding row must not reach any sum or gradient.
        return torch.where(flow.valid_T[:, None], logits_TE, 0)

    @torch.no_grad()
    def _decide(self, scores_TE: Tensor, flow: Flow) -> Decision:
        experts_TK = self.choose(scores_TE, self._context(flow))
        require_places(type(self).__name__, experts_TK, self.record, flow.training)
        plain = type(self).choose is TopKRouter.choose and self.record.groups is None
        plain = plain and self.selection_bias is None
        return Decision(experts_TK, plain_TK=experts_TK if plain else None)

    def _context(self, flow: Flow) -> RoutingContext:
        shared = flow.rows, flow.world.group("tp_cp")
        return RoutingContext(self.record, self.selection_bias, *shared, flow.training, self.layer)

    def _drop(self, decision: Decision, weights_TK: Tensor, flow: Flow) -> Tensor:
        """Return the copies to keep; those of the whole micro-batch compete, over all ranks."""
        assert self.capacity is not None
        top_k = self.record.top_k
        experts = self.record.choices
        limit = self.capacity.max_copies(flow.rows.population, top_k, experts)
        by_weight = weights_TK.detach() if self.capacity.drop == "probs" else None
        if self.capacity.drop == "random":
            by_weight = uniform(flow, top_k, self.layer, DROP, weights_TK)
        context = self._context(flow)
        experts_TK = context.gather(decision.experts_TK)
        by_weight = None if by_weight is None else context.gather(by_weight)
        token_T = context.gather(flow.rows.token_T)
        kept = capacity_mask(experts_TK, by_weight, token_T, limit, experts)
        # Idle experts have no capacity.
        idle_TK = (decision.experts_TK >= self.record.experts) & (decision.experts_TK < experts)
        return context.own(kept) | idle_TK
