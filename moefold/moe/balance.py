"""Load balancing of one MoE layer: loss terms, bias updates, counters and health figures.

T token rows, E experts, K experts per token, N populations (the segments, or all rows as one).

The value of a term is over one micro-batch, without its coefficient. The training loss is

    CE_sum / labels of the step
    + sum over micro-batches j of (valid_j / valid of the step) * sum over layers of c * value_j

so that a coefficient's meaning depends neither on the number of micro-batches nor of ranks. Ranks
that share a micro-batch each compute a partial value of their own tokens; the value is their sum.

Counters count each decision once, in training, even if layers are recomputed. They are int64 sums,
exact in any order, so that the counters of ranks add up to those of a single rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import log
from typing import Literal

import torch
from torch import Tensor, nn

from moefold.comm.collectives import gather, sum_
from moefold.comm.group import Group
from moefold.config.slot import build
from moefold.data.batch import MicroBatch
from moefold.kernels.fused import uses_triton
from moefold.kernels.routing import balance as kernels
from moefold.layers.flow import Flow
from moefold.layers.precision import ExactBuffers
from moefold.moe.config import Aux, Bias, Moe, Quantile, Z
from moefold.moe.config import Router as RouterRecord
from moefold.moe.router import Decision, Routed, Router
from moefold.moe.scoring import probabilities
from moefold.moe.topk import count, select

Population = Literal["micro_batch", "sequence", "global_batch"]
UNIT = 2.0**-32
"""Unit of the fixed-point numbers in which counters add up scores."""


class Observed:
    """Input of a loss term: the routing of one layer for this rank's rows of a micro-batch.

    Other ranks may hold further rows of it. A value divided by the number of local rows would
    depend on the layout: divide by ``population``, or use :meth:`mean`.
    """

    def __init__(self, routed: Routed, rows: MicroBatch, record: Moe) -> None:
        self.logits_TE = routed.logits_TE
        """Router logits; rows that are not valid are finite and must not be counted."""
        self.decision = routed.decision
        self.population = max(rows.population, 1)
        """Number of valid tokens of the whole micro-batch on all ranks; at least 1."""
        self.rows = rows
        """Rows of this rank."""
        self._scores_TE = routed.scores_TE
        self._record = record.router

    @cached_property
    def probability_TE(self) -> Tensor:
        """Probability distribution of each row over the experts, differentiable."""
        return probabilities(self.logits_TE, self._scores_TE, self._record)

    def valid(self, values_TX: Tensor) -> Tensor:
        """Return the rows without padding, which comes last: sums are bitwise those without it."""
        return values_TX if self.rows.n_valid == self.rows.rows else values_TX[: self.rows.n_valid]

    @cached_property
    def shares_PE(self) -> Tensor | None:
        """fp32 partial sums of valid rows' distributions; None where no own kernel runs."""
        valid_TE = self.valid(self.probability_TE).detach()
        own = uses_triton(valid_TE) and valid_TE.dtype == torch.float32
        return kernels.partial_row_sums(valid_TE) if own else None

    def mean(self, values_T: Tensor) -> Tensor:
        """Return the 0-d part of these rows in the mean over the micro-batch's valid tokens."""
        return (sum_by(self.valid(values_T), None, 1).sum() / self.population).to(values_T.dtype)

    @property
    def segment_T(self) -> Tensor | None:
        """int64 segment of each valid row; None if there is only one."""
        return self.rows.segment_T if len(self.rows.lengths) > 1 else None


class Term(ABC):
    """A loss term of the router, computed once per micro-batch and layer."""

    name: str
    coefficient: float
    over: Population | None = None
    """Population whose plain choices the term reads from ``decision.counts``; None if none."""

    @abstractmethod
    def __call__(self, observed: Observed) -> Tensor:
        """Return the 0-d part of this rank's rows in the value, without the coefficient."""


class Update(ABC):
    """An update of the router outside the loss, made once per step."""

    averages = False
    """Whether the update reads ``counters.wanted_X``."""

    def wanted(self, routed: Routed, record: RouterRecord, flow: Flow) -> Tensor:
        """Return the target [E] of a micro-batch with valid tokens, equal on all its ranks."""
        raise NotImplementedError

    @abstractmethod
    def __call__(self, router: Router, counters: "Counters") -> None:
        """Update the router in place from the counters of the global batch."""


class AuxLoss(Term):
    """``E / K * sum_i f_i P_i`` per population, weighted by the population's share of valid tokens.

    f_i is the fraction of tokens whose plain top-k contains expert i, without gradient; P_i is the
    mean probability of i. Over ``global_batch`` f_i is of the step's micro-batches up to this one,
    and P_i of this micro-batch. Without valid tokens the value and its gradient are 0.
    """

    def __init__(self, record: Aux) -> None:
        self.name = f"aux_{record.over}"
        self.coefficient = record.coefficient
        self.over: Population = record.over

    def __call__(self, observed: Observed) -> Tensor:
        """Return the part of these rows in the value, in the logits' dtype."""
        decision = observed.decision
        assert decision.counts is not None and decision.plain_TK is not None
        probability_TE = observed.valid(observed.probability_TE)
        segment_T = observed.segment_T if self.over == "sequence" else None
        counts_NE, top_k = decision.counts[self.over], decision.plain_TK.shape[1]
        if segment_T is None and observed.shares_PE is not None:
            given = (probability_TE, observed.shares_PE, counts_NE.view(-1))
            return kernels.load_balance(*given, top_k, observed.population)
        probability_NE = sum_by(probability_TE, segment_T, counts_NE.shape[0])
        # Each token makes top_k choices, so that the counts determine the number of tokens.
        tokens_N1 = (counts_NE.sum(1, keepdim=True) // top_k).clamp(min=1)
        share_NE = counts_NE.to(probability_NE.dtype) / tokens_N1
        # In this order uniform routing yields exactly 1 if E is a power of two.
        total = (share_NE * probability_NE).sum() / observed.population
        value = total * probability_TE.shape[1] / top_k
        return value.to(observed.logits_TE.dtype)


class ZLoss(Term):
    """Mean over valid tokens of the logits' squared log-sum-exp (ST-MoE, arXiv 2202.08906)."""

    def __init__(self, record: Z) -> None:
        self.name = "z"
        self.coefficient = record.coefficient

    def __call__(self, observed: Observed) -> Tensor:
        """Return the part of these rows in the value, in the logits' dtype."""
        logits_TE = observed.logits_TE
        if uses_triton(logits_TE) and logits_TE.dtype == torch.float32:
            return kernels.z_loss(observed.valid(logits_TE), observed.population)
        return observed.mean(logits_TE.logsumexp(1).square())


class BiasUpdate(Update):
    """``b_i += rate * sign(mean(n) - n_i)``, exact in integers (arXiv 2408.15664).

    n_i is the number of valid tokens that chose expert i, bias included, before capacity drops.
    """

    def __init__(self, record: Bias) -> None:
        self.rate = record.rate

    @torch.no_grad()
    def __call__(self, router: Router, counters: "Counters") -> None:
        """Update the router's selection bias."""
        assert router.selection_bias is not None
        load_E = counters.load_E
        # sign(sum / E - n), without the division, which would round the mean.
        direction_E = (load_E.sum() - load_E * load_E.shape[0]).sign()
        router.selection_bias.add_(direction_E, alpha=self.rate)


class QuantileUpdate(Update):
    """Moves the bias towards quantiles of scores at which every expert has equal load."""

    averages = True

    def __init__(self, record: Quantile) -> None:
        self.rate = record.rate

    def wanted(self, routed: Routed, record: RouterRecord, flow: Flow) -> Tensor:
        """Return the bias [E] with which each expert would have had equal load."""
        scores_TE, bias_E, rows = routed.scores_TE, routed.bias_E, flow.rows
        assert bias_E is not None
        best_TK = select(scores_TE, record.top_k + 1, bias_E=bias_E, groups=record.groups)
        next_T1 = (scores_TE + bias_E).gather(1, best_TK[:, -1:])
        over_TE = torch.where(rows.valid_T[:, None], scores_TE - next_T1, -torch.inf)
        all_TE = gather(over_TE, flow.world.group("tp_cp")).flatten(0, 1)
        share = rows.population * record.top_k // record.choices
        return -all_TE.topk(share + 1, dim=0).values[-1]

    @torch.no_grad()
    def __call__(self, router: Router, counters: "Counters") -> None:
        """Update the router's selection bias."""
        assert router.selection_bias is not None
        total_E, seen = counters.wanted_X[:-1], counters.wanted_X[-1]
        mean_E = total_E.float() * UNIT / seen.clamp(min=1)
        router.selection_bias.lerp_(mean_E, self.rate * (seen > 0).float())


class Counters(ExactBuffers):
    """Sums over the micro-batches of a step; not checkpointed, since each step starts from zero.

    They are of this rank's rows until :func:`sum_counters` sums them over ranks.
    """

    load_E: Tensor
    """int64 number of valid tokens that chose each expert, before capacity drops."""
    sent_E: Tensor
    """int64 number of choices of each expert that capacity did not drop."""
    plain_E: Tensor
    """int64 choices by scores alone in the step's micro-batches so far, summed over data ranks;
    counted only if a term reads it."""
    tokens: Tensor
    """int64 number of valid tokens, 0-d."""
    probability_E: Tensor
    """float32 sum of valid tokens' distributions over the experts."""

    wanted_X: Tensor
    """int64 sums [E] of micro-batches' targets in units of ``UNIT``, exact in any order; then the
    number of micro-batches. Empty if no update reads it."""

    def __init__(self, experts: int, averages: bool = False) -> None:
        super().__init__()
        self.summed = ("load_E", "sent_E", "tokens", "probability_E", *("wanted_X",) * averages)
        integers = {"load_E": (experts,), "sent_E": (experts,), "plain_E": (experts,), "tokens": ()}
        integers["wanted_X"] = ((experts + 1) * averages,)
        for name, shape in integers.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64), persistent=False)
        zeros_E = torch.zeros(experts, dtype=torch.float32)
        self.register_buffer("probability_E", zeros_E, persistent=False)

    @torch.no_grad()
    def add(
        self,
        observed: "Observed",
        routed: Routed,
        load_E: Tensor,
        by_rank_DE: Tensor | None,
        rank: int,
    ) -> Tensor | None:
        """Count a micro-batch, given its choices by expert, and plain choices by data rank.

        Returns:
            int64 [E] plain choices of earlier micro-batches, and of this one on data ranks up to
            this; None if no term reads them.
        """
        rows, shares_PE = observed.rows, observed.shares_PE
        if shares_PE is not None:
            counters = (self.load_E, self.sent_E, self.tokens, self.plain_E, self.probability_E)
            counted = (shares_PE, load_E, routed.counts_E, by_rank_DE)
            so_far_E = kernels.update_counters(*counted, *counters, rows.n_valid, rank)
            return None if by_rank_DE is None else so_far_E
        self.load_E.add_(load_E)
        self.sent_E.add_(routed.counts_E)
        self.tokens.add_(rows.n_valid)
        self.probability_E.add_(observed.valid(observed.probability_TE).sum(0))
        if by_rank_DE is None:
            return None
        so_far_E = self.plain_E + by_rank_DE[: rank + 1].sum(0)
        self.plain_E.add_(by_rank_DE.sum(0))
        return so_far_E


class Balance(nn.Module):
    """Balancing of one MoE layer: its loss terms, its updates, and the counters that they read."""

    weight = 1.0
    """Factor on all coefficients; a multi-token prediction block sets it."""

    def __init__(self, record: Moe) -> None:
        super().__init__()
        self.record = record
        parts = [build(part) for part in record.balance]
        # Terms with coefficient 0 are not computed.
        self.terms = tuple(p for p in parts if isinstance(p, Term) and p.coefficient > 0)
        self.updates = tuple(p for p in parts if isinstance(p, Update))
        self._averaged = [part for part in self.updates if part.averages]
        self.counters = Counters(record.router.choices, bool(self._averaged))
        for part in parts:
            if not isinstance(part, Term | Update):
                raise TypeError(f"{type(part).__name__} is neither a balance Term nor an Update")
        self._populations = tuple(dict.fromkeys(t.over for t in self.terms if t.over is not None))

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficient of each term by name, in order."""
        return {term.name: term.coefficient * self.weight for term in self.terms}

    def forward(self, routed: Routed, flow: Flow) -> tuple[Decision, dict[str, Tensor]]:
        """Count the decision unless it is counted, and return it with its counts and the terms.

        The returned decision is to be stored: a recomputed layer replays it and counts nothing.
        Outside training nothing is counted and there are no terms.
        """
        if not flow.training:
            return routed.decision, {}
        observed = Observed(routed, flow.rows, self.record)
        if self._populations:
            # Computed before any term, so that recomputation saves tensors in the same order.
            _ = observed.probability_TE
        if observed.decision.counts is None:
            observed.decision = self._count(routed, observed, flow)
        return observed.decision, {term.name: term(observed) for term in self.terms}

    @torch.no_grad()
    def start_step(self) -> None:
        """Reset the counters."""
        for buffer in self.counters.buffers():
            buffer.zero_()

    def finish_step(self, router: Router) -> None:
        """Apply the updates, once, after the last micro-batch of a step that is not skipped.

        If the router's weight is frozen, so is its selection bias.
        """
        if router.weight.requires_grad:
            for update in self.updates:
                update(router, self.counters)

    def _count(self, routed: Routed, observed: Observed, flow: Flow) -> Decision:
        # If no term reads ``observed``, use another: recomputation would not save these tensors.
        seen = observed if self._populations else Observed(routed, flow.rows, self.record)
        counters, decision = self.counters, routed.decision
        experts, ranks = counters.load_E.shape[0], flow.world.group("dp")
        with torch.no_grad():
            whole = decision.kept_TK is None
            load_E = routed.counts_E if whole else count(decision.experts_TK, experts)
            if self._populations and decision.plain_TK is None:
                top_k = self.record.router.top_k
                plain_TK = select(routed.scores_TE, top_k, valid_T=flow.valid_T)
                decision = replace(decision, plain_TK=plain_TK)
            counts, by_rank_DE = self._counts(decision, load_E, seen, flow), None
            if "global_batch" in self._populations:
                # Of the micro-batches that data ranks run at once, lower ranks' count as earlier.
                by_rank_DE = gather(counts["micro_batch"].view(-1), ranks)
            so_far_E = counters.add(seen, routed, load_E, by_rank_DE, ranks.index)
            for update in self._averaged if flow.rows.population else ():
                wanted_E = update.wanted(routed, self.record.router, flow).nan_to_num() / UNIT
                counters.wanted_X[:-1].add_(wanted_E.round().to(torch.int64))
                counters.wanted_X[-1:].add_(1)
        if so_far_E is not None:
            counts["global_batch"] = so_far_E[None]
        return replace(decision, counts=counts)

    def _counts(
        self, decision: Decision, load_E: Tensor, seen: Observed, flow: Flow
    ) -> dict[str, Tensor]:
        """Return plain choices [N, E] of the micro-batch, by kind of population that terms read."""
        if not self._populations:
            return {}
        assert decision.plain_TK is not None
        experts, ranks = load_E.shape[0], flow.world.group("tp_cp")
        kind = "sequence" if "sequence" in self._populations else "micro_batch"
        segment_T = seen.segment_T if kind == "sequence" else None
        if segment_T is None and decision.plain_TK is decision.experts_TK:
            counts_NE = load_E[None]
        else:
            populations = 1 if segment_T is None else len(flow.rows.lengths)
            plain_TK = seen.valid(decision.plain_TK)
            counts_NE = count_by(plain_TK, segment_T, populations, experts)
        if ranks.size > 1:
            counts_NE = sum_(counts_NE.clone(), ranks)
        # The counts of segments add up to those of the micro-batch.
        whole_1E = counts_NE if len(counts_NE) == 1 else counts_NE.sum(0, keepdim=True)
        return {kind: counts_NE, "micro_batch": whole_1E}

    @torch.no_grad()
    def health(self, router: Router) -> dict[str, Tensor]:
        """Return the step's health figures, on the router's device.

        ``load`` [E] is the share of each expert in the choices. ``load_entropy`` and
        ``probability_entropy`` (of the mean probability) are relative to the uniform
        distribution's entropy: 1 is uniform, 0 is one expert. The other figures are
        ``load_max_over_mean``, ``dead_experts``, ``drop_rate`` and ``bias_range``.
        """
        counters = self.counters
        load_E, total = counters.load_E, counters.load_E.sum().clamp(min=1)
        sent = counters.sent_E.sum() / total
        probability_E = counters.probability_E / counters.probability_E.sum().clamp(min=1e-9)
        figures = {
            "load": (load_E / total).float(),
            "load_max_over_mean": (load_E.max() * load_E.shape[0] / total).float(),
            "dead_experts": (load_E == 0).sum(),
            "load_entropy": _evenness(load_E / total),
            "probability_entropy": _evenness(probability_E),
            "drop_rate": torch.where(load_E.sum() > 0, 1 - sent, 0),
        }
        bias_E = router.selection_bias
        if bias_E is not None:
            figures["bias_range"] = bias_E.max() - bias_E.min()
        return figures


@torch.no_grad()
def sum_counters(balances: Sequence[Balance], ranks: Group) -> None:
    """Sum each layer's counters over all ranks that share the step."""
    if ranks.size == 1:
        return
    for name in dict.fromkeys(name for balance in balances for name in balance.counters.summed):
        parts = [getattr(balance.counters, name) for balance in balances]
        flat = torch.cat([part.reshape(-1) for part in parts])
        sum_(flat, ranks)
        for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(summed.view_as(part))


def sum_by(values_TX: Tensor, population_T: Tensor | None, populations: int) -> Tensor:
    """Return the sum [N, ...] of each population's rows, in float64 if the device supports it.

    Without ``population_T`` all rows are one population. With it, CUDA adds in arbitrary order
    unless torch runs deterministically; that affects the last bits of values only, as no term's
    gradient depends on such a sum.
    """
    dtype = values_TX.dtype if values_TX.device.type == "mps" else torch.float64
    if population_T is None:
        return values_TX.sum(0, keepdim=True, dtype=dtype)
    sums_NX = values_TX.new_zeros((populations, *values_TX.shape[1:]), dtype=dtype)
    return sums_NX.index_add(0, population_T, values_TX.to(dtype))


@torch.no_grad()
def count_by(
    experts_TK: Tensor, population_T: Tensor | None, populations: int, experts: int
) -> Tensor:
    """Return int64 [N, E] choices by population and expert; all rows must be valid."""
    if population_T is None:
        return count(experts_TK, experts)[None]
    cell_TK = population_T[:, None] * experts + experts_TK
    return count(cell_TK, populations * experts).view(populations, experts)


def _evenness(share_E: Tensor) -> Tensor:
    experts = share_E.shape[0]
    even = torch.ones((), device=share_E.device)
    return torch.special.entr(share_E).sum() / log(experts) if experts > 1 else even
