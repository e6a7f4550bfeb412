"""The router: which experts take a token, and with which weights.

T token rows, D hidden, E experts, K experts per token, G groups of e = E / G experts each,
C = T * K copies (a token beside one of its experts).

The *decision* (experts and drops) is made once per micro-batch and kept; a second run of the layer
is given it and computes only scores and weights anew, so the router's gradient is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.comm.collectives import gather
from moefold.kernels.linear.product import linear
from moefold.layers.flow import Flow
from moefold.moe.buffers import ExactBuffers
from moefold.moe.config import Capacity, Groups
from moefold.moe.config import Router as RouterRecord

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Decision:
    """What was decided for a micro-batch's rows: kept for every further run, never made again.

    A decision recorded elsewhere and replayed here needs no more than ``experts_TK``.
    """

    experts_TK: Tensor
    """int64 expert ids, best first, ties by the lowest id; E in rows that are not valid."""
    kept_TK: Tensor | None = None
    """bool, False for copies dropped by capacity and rows that are not valid; None if dropless."""
    plain_TK: Tensor | None = None
    """int64 top-k of the scores alone (no bias, no groups), which auxiliary losses count."""
    counts: Mapping[str, Tensor] | None = None
    """int64 [N, E] plain choices of each population's tokens, on whatever rank they are, by kind
    of population; None until the layer's counters have seen the decision."""


@dataclass(frozen=True)
class Routing:
    """What dispatch and experts need of a routed micro-batch."""

    experts_TK: Tensor
    """As in :class:`Decision`."""
    kept_TK: Tensor | None
    """As in :class:`Decision`."""
    sent_TK: Tensor
    """``experts_TK`` with E for dropped copies too: what dispatch sends."""
    weights_TK: Tensor
    """Weights of the experts' outputs, in the scores' dtype, differentiable; 0 for the unsent."""
    counts_E: Tensor
    """int64 copies that each expert is sent."""


@dataclass(frozen=True)
class Routed:
    """All that a router computes; rows that are not valid read as zero logits."""

    routing: Routing
    decision: Decision
    logits_TE: Tensor
    scores_TE: Tensor


class Router(ExactBuffers):
    """Scores of tokens against experts, and the choice among them.

    ``weight`` [E, D] is the master parameter. ``selection_bias`` [E] (where the record has one) is
    a float32 buffer that stays float32 when the model is cast; it moves choices, never weights.
    """

    def __init__(self, record: RouterRecord, hidden: int, capacity: Capacity | None = None) -> None:
        super().__init__()
        self.record = record
        self.capacity = capacity
        self.weight = nn.Parameter(torch.empty(record.experts, hidden))
        bias_E = torch.zeros(record.experts, dtype=torch.float32) if record.selection_bias else None
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", bias_E)

    def forward(self, x_TD: Tensor, flow: Flow, decision: Decision | None = None) -> Routed:
        """Route the rows; with ``decision`` nothing is chosen or dropped anew.

        Non-finite logits in valid rows still give some choice, the same one each time.
        """
        logits_TE = self._logits(x_TD, flow)
        scores_TE = self.scores(logits_TE)
        fresh = decision is None
        if decision is None:
            decision = self._choose(scores_TE, flow.valid_T)
        weights_TK = weights(scores_TE, decision.experts_TK, self.record)
        if fresh and self.capacity is not None and not flow.dropless:
            decision = replace(decision, kept_TK=self._drop(decision, weights_TK, flow))
        routing = self._route(decision, weights_TK, flow.valid_T)
        return Routed(routing, decision, logits_TE, scores_TE)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores [T, E] that experts are chosen and weighed by; made to be replaced."""
        return scores(logits_TE, self.record)

    def _logits(self, x_TD: Tensor, flow: Flow) -> Tensor:
        """Return [T, E] in the wider of the record's and the rows' dtype."""
        dtype = torch.promote_types(DTYPES[self.record.dtype], x_TD.dtype)
        weight = flow.operand(self.weight, dtype)
        logits_TE = linear(x_TD, weight, n_valid=flow.n_valid, sink=flow.sink)
        if flow.valid_T is None:
            return logits_TE
        # Selection, not multiplication: a NaN in a padding row must not reach any sum or gradient.
        return torch.where(flow.valid_T[:, None], logits_TE, 0)

    def _choose(self, scores_TE: Tensor, valid_T: Tensor | None) -> Decision:
        top_k, groups, bias_E = self.record.top_k, self.record.groups, self.selection_bias
        experts_TK = select(scores_TE, top_k, bias_E=bias_E, groups=groups, valid_T=valid_T)
        plain = bias_E is None and groups is None
        return Decision(experts_TK, plain_TK=experts_TK if plain else None)

    def _drop(self, decision: Decision, weights_TK: Tensor, flow: Flow) -> Tensor:
        """Return which copies stay; the whole micro-batch competes, on whatever ranks it is."""
        assert self.capacity is not None
        top_k, experts = self.record.top_k, self.record.experts
        limit = self.capacity.copies(flow.rows.population, top_k, experts)
        by_weight = weights_TK.detach() if self.capacity.drop == "probs" else None
        ranks = flow.world.group("tp_cp")
        if ranks.size == 1:
            return drop(decision.experts_TK, by_weight, flow.rows.token_T, limit, experts)
        everywhere = [
            None if part is None else gather(part, ranks).flatten(0, 1)
            for part in (decision.experts_TK, by_weight, flow.rows.token_T)
        ]
        experts_TK, by_weight, token_T = everywhere
        assert experts_TK is not None and token_T is not None
        kept = drop(experts_TK, by_weight, token_T, limit, experts)
        return kept.unflatten(0, (ranks.size, -1))[ranks.index]

    def _route(self, decision: Decision, weights_TK: Tensor, valid_T: Tensor | None) -> Routing:
        experts_TK, kept_TK = decision.experts_TK, decision.kept_TK
        sent_TK, experts = experts_TK, self.record.experts
        if kept_TK is not None:
            sent_TK = torch.where(kept_TK, experts_TK, experts)
        if kept_TK is not None or valid_T is not None:
            weights_TK = torch.where(sent_TK < experts, weights_TK, 0)
        return Routing(experts_TK, kept_TK, sent_TK, weights_TK, count(sent_TK, experts))


def scores(logits_TE: Tensor, record: RouterRecord) -> Tensor:
    """Return the scores [T, E] that experts are chosen by, in the logits' dtype.

    Where the softmax comes after the choice, these are the logits themselves.
    """
    if record.order == "topk_first":
        return logits_TE
    match record.score:
        case "softmax":
            return logits_TE.softmax(1)
        case "sigmoid":
            return _in_whole_vectors(torch.sigmoid, logits_TE)
        case "sqrt_softplus":
            # The bound keeps the gradient finite where softplus underflows.
            soft_TE = _in_whole_vectors(F.softplus, logits_TE)
            return soft_TE.clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()


def _in_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function so that no value's bits depend on how many there are.

    On a CPU torch computes what is left over after the last whole vectors by another formula.
    """
    left_over = -values.numel() % 32  # two vectors of the widest CPU, as torch steps
    if left_over == 0 or values.device.type != "cpu":
        return function(values)
    padded = F.pad(values.flatten(), (0, left_over))
    return function(padded)[: values.numel()].view_as(values)


def probabilities(logits_TE: Tensor, scores_TE: Tensor, record: RouterRecord) -> Tensor:
    """Return each row's distribution over all experts: softmax, or the scores over their sum."""
    if record.score == "softmax":
        return scores_TE if record.order == "score_first" else logits_TE.softmax(1)
    total_T1 = scores_TE.sum(1, keepdim=True)
    return scores_TE / total_T1.clamp(min=torch.finfo(scores_TE.dtype).tiny)


@torch.no_grad()
def select(
    scores_TE: Tensor,
    top_k: int,
    *,
    bias_E: Tensor | None = None,
    groups: Groups | None = None,
    valid_T: Tensor | None = None,
) -> Tensor:
    """Return the ids [T, K] of the best experts, best first, by score plus bias within groups.

    Equal experts, and equal groups, are taken by lowest id. NaN counts as the largest. Rows that
    are not valid hold E.
    """
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if groups is not None:
        choice_TE = _within_groups(choice_TE, groups)
    experts_TK = best(choice_TE, top_k)
    if valid_T is None:
        return experts_TK
    return torch.where(valid_T[:, None], experts_TK, scores_TE.shape[1])


def _within_groups(choice_TE: Tensor, groups: Groups) -> Tensor:
    choice_TGe = choice_TE.unflatten(1, (groups.count, choice_TE.shape[1] // groups.count))
    if groups.score == "max":
        score_TG = choice_TGe.amax(2)
    else:
        score_TG = choice_TGe.topk(groups.best, dim=2).values.sum(2)
    chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, best(score_TG, groups.keep), True)
    return torch.where(chosen_TG[:, :, None], choice_TGe, -torch.inf).flatten(1)


@torch.no_grad()
def best(values_TE: Tensor, k: int) -> Tensor:
    """Return the ids [T, k] of the k largest of each row, largest first, ties by lowest id.

    ``torch.topk`` leaves ties open. On a CPU k maxima (whose first index torch promises) take as
    long as one ``topk`` and a third of a stable sort; on a device one sort is fewer launches.
    """
    if values_TE.device.type != "cpu":
        return values_TE.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    # What was taken becomes -inf, below all that is left.
    left_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    picks = []
    for _ in range(k):
        pick_T1 = left_TE.max(dim=1, keepdim=True).indices
        left_TE.scatter_(1, pick_T1, -torch.inf)
        picks.append(pick_T1)
    return torch.cat(picks, dim=1)


def weights(scores_TE: Tensor, experts_TK: Tensor, record: RouterRecord) -> Tensor:
    """Return the weights [T, K] of the chosen experts, differentiable in the scores.

    A softmax over the chosen ones sums to one already, so ``renormalise`` and ``epsilon`` do
    nothing where the order is ``topk_first``. Rows of the sentinel E hold some finite weight.
    """
    weights_TK = scores_TE.gather(1, experts_TK.clamp(max=scores_TE.shape[1] - 1))
    if record.order == "topk_first":
        weights_TK = weights_TK.softmax(1)
    elif record.renormalise:
        total_T1 = weights_TK.sum(1, keepdim=True)
        weights_TK = weights_TK / (total_T1 + record.epsilon if record.epsilon else total_T1)
    return weights_TK if record.scale == 1.0 else weights_TK * record.scale


@torch.no_grad()
def drop(
    experts_TK: Tensor, weights_TK: Tensor | None, token_T: Tensor, limit: int, experts: int
) -> Tensor:
    """Return which copies [T, K] stay when no expert takes more than ``limit`` of them.

    Args:
        experts_TK: expert ids; copies of the sentinel ``experts`` never stay.
        weights_TK: the largest stay, ties by lowest global token id; None keeps the lowest ids.
        token_T: global token ids.
        limit: copies per expert, over all rows.
        experts: number of experts E.
    """
    top_k = experts_TK.shape[1]
    # Stable sorts from the least significant key to the most: token, weight, expert.
    row_T = token_T.argsort(stable=True)
    copy_C = (row_T[:, None] * top_k + torch.arange(top_k, device=row_T.device)).flatten()
    if weights_TK is not None:
        weight_C = weights_TK.flatten().index_select(0, copy_C)
        copy_C = copy_C.index_select(0, weight_C.argsort(descending=True, stable=True))
    expert_C, order_C = experts_TK.flatten().index_select(0, copy_C).sort(stable=True)
    first_C = torch.searchsorted(expert_C, expert_C)
    rank_C = torch.arange(expert_C.shape[0], device=expert_C.device) - first_C
    stays_C = (rank_C < limit) & (expert_C < experts)
    return (
        torch.zeros_like(stays_C)
        .scatter_(0, copy_C.index_select(0, order_C), stays_C)
        .view_as(experts_TK)
    )


@torch.no_grad()
def count(experts_TK: Tensor, experts: int) -> Tensor:
    """Return int64 [E]: how many copies name each expert, those of the sentinel E left out.

    Integer sums are exact in any order, so atomics on a device change nothing.
    """
    expert_C = experts_TK.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert_C.device)
    return counts.scatter_add_(0, expert_C, torch.ones_like(expert_C))[:experts]
