"""Load balancing of one MoE layer: loss terms, bias updates, counters and health figures.

T token rows, E experts, K experts per token, N populations (the segments, or all rows as one).

The value of a term is over one micro-batch, without its coefficient. The training loss is

    CE_sum / labels of the step
    + sum over micro-batches j of (valid_j / valid of the step) * sum over layers of c * value_j

so a coefficient means the same for any number of micro-batches and ranks. Ranks that share a
micro-batch each compute a partial value from their own tokens; the value is the sum.

Counters count each decision once, in training, even if layers are recomputed. They are int64 sums,
exact in any order, so the counters of several ranks add up to those of a single rank.
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
from moefold.moe.config import Aux, Bias, Moe, Quantile, Router, Z
from moefold.moe.router import Decision, Routed, TopKRouter
from moefold.moe.scoring import probabilities
from moefold.moe.topk import count, select

Population = Literal["micro_batch", "sequence", "global_batch"]
UNIT = 2.0**-32
"""Unit of the fixed-point numbers in which counters sum targets."""


class Observed:
    """Input of a loss term: one layer's routing of this rank's rows of a micro-batch.

    Other ranks may hold further rows of the micro-batch. A value divided by the number of local
    rows would depend on the layout: divide by ``population``, or use :meth:`mean`.
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
        """Differentiable probability distribution of each row over the experts."""
        return probabilities(self.logits_TE, self._scores_TE, self._record)

    def valid(self, values_TX: Tensor) -> Tensor:
        """Return the rows without padding, which is last; sums are bitwise as without padding."""
        if self.rows.n_valid == self.rows.rows:
            return values_TX
        return values_TX[: self.rows.n_valid]

    @cached_property
    def partial_sums_PE(self) -> Tensor | None:
        """fp32 partial sums of valid rows' distributions; None without the fused kernel."""
        valid_TE = self.valid(self.probability_TE).detach()
        use_kernel = uses_triton(valid_TE) and valid_TE.dtype == torch.float32
        return kernels.partial_row_sums(valid_TE) if use_kernel else None

    def mean(self, values_T: Tensor) -> Tensor:
        """Return these rows' 0-d contribution to the mean over the micro-batch's valid tokens."""
        total = sum_rows(self.valid(values_T), None, 1).sum()
        return (total / self.population).to(values_T.dtype)

    @property
    def segment_T(self) -> Tensor | None:
        """int64 segment of each valid row; None if there is only one."""
        return self.rows.segment_T if len(self.rows.lengths) > 1 else None


class Term(ABC):
    """A loss term of the router, computed once per micro-batch and layer."""

    name: str
    coefficient: float
    over: Population | None = None
    """Population whose plain choices the term reads from ``decision.counts``, if any."""

    @abstractmethod
    def __call__(self, observed: Observed) -> Tensor:
        """Return this rank's 0-d contribution to the value, without the coefficient."""


class Update(ABC):
    """Update of the router once per step, outside the loss."""

    uses_target = False
    """Whether the update reads ``counters.target_sums_X``."""

    def target(self, routed: Routed, record: Router, flow: Flow) -> Tensor:
        """Return a target [E] from a micro-batch with valid tokens, equal on all its ranks."""
        raise NotImplementedError

    @abstractmethod
    def __call__(self, router: TopKRouter, counters: "Counters") -> None:
        """Update the router in place from the counters of the global batch."""


class AuxLoss(Term):
    """``E / K * sum_i f_i P_i`` per population, weighted by the population's share of valid tokens.

    f_i, without gradient, is the fraction of tokens whose plain top-k contains expert i; P_i is the
    mean probability of i. Over ``global_batch`` f_i covers the step's micro-batches up to this one,
    and P_i this micro-batch. Without valid tokens the value and its gradient are 0.
    """

    def __init__(self, record: Aux) -> None:
        self.name = f"aux_{record.over}"
        self.coefficient = record.coefficient
        self.over: Population = record.over

    def __call__(self, observed: Observed) -> Tensor:
        """Return these rows' contribution to the value, in the logits' dtype."""
        decision = observed.decision
        assert decision.counts is not None and decision.plain_TK is not None
        probability_TE = observed.valid(observed.probability_TE)
        segment_T = observed.segment_T if self.over == "sequence" else None
        counts_NE = decision.counts[self.over]
        top_k = decision.plain_TK.shape[1]
        if segment_T is None and observed.partial_sums_PE is not None:
            sums = (probability_TE, observed.partial_sums_PE, counts_NE.view(-1))
            return kernels.load_balance(*sums, top_k, observed.population)
        probability_NE = sum_rows(probability_TE, segment_T, counts_NE.shape[0])
        # Each token makes top_k choices, so the counts determine the number of tokens.
        tokens_N1 = (counts_NE.sum(1, keepdim=True) // top_k).clamp(min=1)
        fraction_NE = counts_NE.to(probability_NE.dtype) / tokens_N1
        # In this order uniform routing yields exactly 1 if E is a power of two.
        total = (fraction_NE * probability_NE).sum() / observed.population
        value = total * probability_TE.shape[1] / top_k
        return value.to(observed.logits_TE.dtype)


class ZLoss(Term):
    """Mean over valid tokens of the logits' squared log-sum-exp (ST-MoE, arXiv 2202.08906)."""

    def __init__(self, record: Z) -> None:
        self.name = "z"
        self.coefficient = record.coefficient

    def __call__(self, observed: Observed) -> Tensor:
        """Return these rows' contribution to the value, in the logits' dtype."""
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
    def __call__(self, router: TopKRouter, counters: "Counters") -> None:
        """Update the router's selection bias."""
        assert router.selection_bias is not None
        load_E = counters.load_E
        # sign(sum / E - n) without the division, which would round the mean.
        direction_E = (load_E.sum() - load_E * load_E.shape[0]).sign()
        router.selection_bias.add_(direction_E, alpha=self.rate)


class QuantileUpdate(Update):
    """Moves the bias towards score quantiles at which all experts have equal load."""

    uses_target = True

    def __init__(self, record: Quantile) -> None:
        self.rate = record.rate

    def target(self, routed: Routed, record: Router, flow: Flow) -> Tensor:
        """Return the bias [E] that would have given all experts equal load."""
        scores_TE = routed.scores_TE
        bias_E = routed.bias_E
        rows = flow.rows
        assert bias_E is not None
        best_TK = select(scores_TE, record.top_k + 1, bias_E=bias_E, groups=record.groups)
        next_T1 = (scores_TE + bias_E).gather(1, best_TK[:, -1:])  # the (K+1)-th largest
        valid_T1 = rows.valid_T[:, None]
        margin_TE = torch.where(valid_T1, scores_TE - next_T1, -torch.inf)
        all_TE = gather(margin_TE, flow.world.group("tp_cp")).flatten(0, 1)
        per_expert = rows.population * record.top_k // record.choices
        largest = all_TE.topk(per_expert + 1, dim=0).values
        return -largest[-1]

    @torch.no_grad()
    def __call__(self, router: TopKRouter, counters: "Counters") -> None:
        """Update the router's selection bias."""
        assert router.selection_bias is not None
        total_E = counters.target_sums_X[:-1]
        number = counters.target_sums_X[-1]
        mean_E = total_E.float() * UNIT / number.clamp(min=1)
        # Without a target the bias stays.
        weight = self.rate * (number > 0).float()
        router.selection_bias.lerp_(mean_E, weight)


class Counters(ExactBuffers):
    """Sums over a step's micro-batches; not checkpointed, since each step starts from zero.

    They cover this rank's rows until :func:`sum_counters` sums them over ranks.
    """

    load_E: Tensor
    """int64 number of valid tokens that chose each expert, before capacity drops."""
    sent_E: Tensor
    """int64 number of choices of each expert that capacity kept."""
    plain_E: Tensor
    """int64 choices by plain scores in the step's micro-batches so far, summed over data ranks;
    counted only if a term reads them."""
    tokens: Tensor
    """int64 number of valid tokens, 0-d."""
    probability_E: Tensor
    """float32 sum of valid tokens' distributions over the experts."""
    target_sums_X: Tensor
    """int64 sums [E] of micro-batches' targets in multiples of ``UNIT``, exact in any order, then
    the number of micro-batches. Empty if no update reads them."""

    def __init__(self, experts: int, has_targets: bool = False) -> None:
        super().__init__()
        names = ("load_E", "sent_E", "tokens", "probability_E")
        self.summed_names = (*names, "target_sums_X") if has_targets else names
        integers = {"load_E": (experts,), "sent_E": (experts,), "plain_E": (experts,), "tokens": ()}
        integers["target_sums_X"] = ((experts + 1) * has_targets,)
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
        """Count a micro-batch from its choices by expert and its plain choices by data rank.

        Returns:
            int64 [E] plain choices of earlier micro-batches, and of this one on data ranks up to
            ``rank``; None if no term reads them.
        """
        rows = observed.rows
        sums_PE = observed.partial_sums_PE
        if sums_PE is not None:
            counters = (self.load_E, self.sent_E, self.tokens, self.plain_E, self.probability_E)
            inputs = (sums_PE, load_E, routed.counts_E, by_rank_DE)
            cumulative_E = kernels.update_counters(*inputs, *counters, rows.n_valid, rank)
            return None if by_rank_DE is None else cumulative_E
        self.load_E.add_(load_E)
        self.sent_E.add_(routed.counts_E)
        self.tokens.add_(rows.n_valid)
        self.probability_E.add_(observed.valid(observed.probability_TE).sum(0))
        if by_rank_DE is None:
            return None
        up_to_rank_E = by_rank_DE[: rank + 1].sum(0)
        cumulative_E = self.plain_E + up_to_rank_E
        self.plain_E.add_(by_rank_DE.sum(0))
        return cumulative_E


class Balance(nn.Module):
    """Balancing of one MoE layer: loss terms, updates, and the counters that they read."""

    weight = 1.0
    """Factor on all coefficients; a multi-token prediction block sets it."""

    def __init__(self, record: Moe) -> None:
        super().__init__()
        self.record = record
        parts = [build(part) for part in record.balance]
        terms = [part for part in parts if isinstance(part, Term)]
        # Terms with coefficient 0 are not computed.
        self.terms = tuple(term for term in terms if term.coefficient > 0)
        self.updates = tuple(part for part in parts if isinstance(part, Update))
        self._target_updates = [part for part in self.updates if part.uses_target]
        self.counters = Counters(record.router.choices, bool(self._target_updates))
        for part in parts:
            if not isinstance(part, Term | Update):
                raise TypeError(f"{type(part).__name__} is neither a balance Term nor an Update")
        populations = [term.over for term in self.terms if term.over is not None]
        self._populations = tuple(dict.fromkeys(populations))

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficient of each term by name, in order."""
        return {term.name: term.coefficient * self.weight for term in self.terms}

    def forward(self, routed: Routed, flow: Flow) -> tuple[Decision, dict[str, Tensor]]:
        """Count the decision, unless that is done; return it with its counts, and the terms.

        Store the returned decision: a recomputed layer replays it and counts nothing.
        Outside training nothing is counted and there are no terms.
        """
        if not flow.training:
            return routed.decision, {}
        observed = Observed(routed, flow.rows, self.record)
        if self._populations:
            # Computed before any term, so recomputation saves tensors in the same order.
            _ = observed.probability_TE
        if observed.decision.counts is None:
            observed.decision = self._count(routed, observed, flow)
        return observed.decision, {term.name: term(observed) for term in self.terms}

    @torch.no_grad()
    def start_step(self) -> None:
        """Reset the counters."""
        for buffer in self.counters.buffers():
            buffer.zero_()

    def finish_step(self, router: TopKRouter) -> None:
        """Apply the updates after the last micro-batch of a step that is not skipped.

        If the router's weight is frozen, so is its selection bias.
        """
        if router.weight.requires_grad:
            for update in self.updates:
                update(router, self.counters)

    def _count(self, routed: Routed, observed: Observed, flow: Flow) -> Decision:
        # If no term reads ``observed``, use another: recomputation would not save its tensors.
        source = observed if self._populations else Observed(routed, flow.rows, self.record)
        counters = self.counters
        decision = routed.decision
        experts = counters.load_E.shape[0]
        ranks = flow.world.group("dp")
        with torch.no_grad():
            dropless = decision.kept_TK is None
            load_E = routed.counts_E if dropless else count(decision.experts_TK, experts)
            if self._populations and decision.plain_TK is None:
                top_k = self.record.router.top_k
                plain_TK = select(routed.scores_TE, top_k, valid_T=flow.valid_T)
                decision = replace(decision, plain_TK=plain_TK)
            counts = self._population_counts(decision, load_E, source, flow)
            by_rank_DE = None
            if "global_batch" in self._populations:
                # Data ranks run micro-batches at once: those of lower ranks count as earlier.
                by_rank_DE = gather(counts["micro_batch"].view(-1), ranks)
            cumulative_E = counters.add(source, routed, load_E, by_rank_DE, ranks.index)
            for update in self._target_updates if flow.rows.population else ():
                target_E = update.target(routed, self.record.router, flow).nan_to_num()
                units_E = (target_E / UNIT).round()
                counters.target_sums_X[:-1].add_(units_E.to(torch.int64))
                counters.target_sums_X[-1:].add_(1)
        if cumulative_E is not None:
            counts["global_batch"] = cumulative_E[None]
        return replace(decision, counts=counts)

    def _population_counts(
        self, decision: Decision, load_E: Tensor, source: Observed, flow: Flow
    ) -> dict[str, Tensor]:
        """Return plain choices [N, E] of the micro-batch for each kind of population in use."""
        if not self._populations:
            return {}
        assert decision.plain_TK is not None
        experts = load_E.shape[0]
        ranks = flow.world.group("tp_cp")
        kind = "sequence" if "sequence" in self._populations else "micro_batch"
        segment_T = source.segment_T if kind == "sequence" else None
        if segment_T is None and decision.plain_TK is decision.experts_TK:
            counts_NE = load_E[None]
        else:
            populations = 1 if segment_T is None else len(flow.rows.lengths)
            plain_TK = source.valid(decision.plain_TK)
            counts_NE = count_choices(plain_TK, segment_T, populations, experts)
        if ranks.size > 1:
            counts_NE = sum_(counts_NE.clone(), ranks)
        total_1E = counts_NE
        if len(counts_NE) > 1:
            # The counts of segments add up to those of the micro-batch.
            total_1E = counts_NE.sum(0, keepdim=True)
        return {kind: counts_NE, "micro_batch": total_1E}

    @torch.no_grad()
    def health(self, router: TopKRouter) -> dict[str, Tensor]:
        """Return the step's health figures, on the router's device.

        ``load`` [E] is each expert's fraction of the choices. ``load_entropy`` and
        ``probability_entropy`` (of the mean probability) are relative to the uniform
        distribution's entropy: 1 is uniform, 0 is one expert. The other figures are
        ``load_max_over_mean``, ``dead_experts``, ``drop_rate`` and ``bias_range``.
        """
        counters = self.counters
        load_E = counters.load_E
        total = counters.load_E.sum().clamp(min=1)
        sent = counters.sent_E.sum() / total
        probability_E = counters.probability_E / counters.probability_E.sum().clamp(min=1e-9)
        share_E = load_E / total
        max_over_mean = load_E.max() * load_E.shape[0] / total
        drop_rate = torch.where(load_E.sum() > 0, 1 - sent, 0)
        figures = {
            "load": share_E.float(),
            "load_max_over_mean": max_over_mean.float(),
            "dead_experts": (load_E == 0).sum(),
            "load_entropy": _normalised_entropy(share_E),
            "probability_entropy": _normalised_entropy(probability_E),
            "drop_rate": drop_rate,
        }
        bias_E = router.selection_bias
        if bias_E is not None:
            figures["bias_range"] = bias_E.max() - bias_E.min()
        return figures


@torch.no_grad()
def sum_counters(balances: Sequence[Balance], ranks: Group) -> None:
    """Sum each layer's counters over all ranks of the step."""
    if ranks.size == 1:
        return
    for name in dict.fromkeys(name for b in balances for name in b.counters.summed_names):
        parts = [getattr(balance.counters, name) for balance in balances]
        flat = torch.cat([part.reshape(-1) for part in parts])
        sum_(flat, ranks)
        sizes = [part.numel() for part in parts]
        for part, summed in zip(parts, flat.split(sizes), strict=True):
            part.copy_(summed.view_as(part))


def sum_rows(values_TX: Tensor, population_T: Tensor | None, populations: int) -> Tensor:
    """Return the sum [N, ...] of each population's rows, in float64 if the device supports it.

    Without ``population_T`` all rows are one population. With it, CUDA adds in arbitrary order
    unless torch runs deterministically; that affects only the last bits of values, since no term's
    gradient depends on such a sum.
    """
    dtype = values_TX.dtype if values_TX.device.type == "mps" else torch.float64
    if population_T is None:
        return values_TX.sum(0, keepdim=True, dtype=dtype)
    sums_NX = values_TX.new_zeros((populations, *values_TX.shape[1:]), dtype=dtype)
    return sums_NX.index_add(0, population_T, values_TX.to(dtype))


@torch.no_grad()
def count_choices(
    experts_TK: Tensor, population_T: Tensor | None, populations: int, experts: int
) -> Tensor:
    """Return int64 [N, E] choices by population and expert; all rows must be valid."""
    if population_T is None:
        return count(experts_TK, experts)[None]
    cell_TK = population_T[:, None] * experts + experts_TK
    return count(cell_TK, populations * experts).view(populations, experts)


def _normalised_entropy(fraction_E: Tensor) -> Tensor:
    experts = fraction_E.shape[0]
    if experts == 1:
        # The logarithm of one expert is 0.
        return torch.ones((), device=fraction_E.device)
    entropy = torch.special.entr(fraction_E).sum()
    return entropy / log(experts)
