"""Routers that do not choose by a row's scores alone.

T token rows, E experts, K experts per token.
"""

import torch
from torch import Tensor

from moefold.kernels.quantise.philox import chance
from moefold.moe.config import Capacity, ExpertChoice, RoundRobin, Sinkhorn
from moefold.moe.draws import HASH, SKEW
from moefold.moe.router import RoutingContext, TopKRouter
from moefold.moe.scoring import score
from moefold.moe.topk import select


class SinkhornRouter(TopKRouter):
    """Top-k of scores, rescaled in training until demand for all experts is equal."""

    record: Sinkhorn

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Choose by rescaled scores in training, and by plain scores otherwise."""
        if not context.training:
            return super().choose(scores_TE, context)
        if self.record.order == "topk_first":
            scores_TE = score(scores_TE, self.record)
        tiny = torch.finfo(scores_TE.dtype).tiny
        for _ in range(self.record.rounds):
            demand_E = context.sum(context.valid(scores_TE).sum(0))
            scores_TE = scores_TE / demand_E.clamp(min=tiny)
            scores_TE = scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=tiny)
        return super().choose(scores_TE, context)


class ExpertChoiceRouter(TopKRouter):
    """In training, each expert takes the tokens of the micro-batch with its highest scores."""

    record: ExpertChoice

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Let experts choose in training, and tokens otherwise."""
        if not context.training:
            return super().choose(scores_TE, context)
        record = self.record
        rows = context.rows
        per_expert = Capacity(factor=1.0).max_copies(rows.population, record.top_k, record.experts)
        valid_T1 = rows.valid_T[:, None]
        masked_TE = torch.where(valid_T1, scores_TE, -torch.inf)
        all_TE, token_T = (context.gather(part) for part in (masked_TE, rows.token_T))
        # Ties go to the earliest token over all ranks.
        row_T = token_T.argsort(stable=True)
        order_TE = all_TE[row_T].sort(dim=0, descending=True, stable=True).indices
        chosen_TE = torch.zeros_like(all_TE, dtype=torch.bool)
        chosen_TE.scatter_(0, row_T[order_TE[:per_expert]], True)
        own_TE = torch.where(context.own(chosen_TE) & valid_T1, scores_TE, -torch.inf)
        best_TE, experts_TE = own_TE.sort(dim=1, descending=True, stable=True)
        experts_TE = torch.where(best_TE == -torch.inf, record.experts, experts_TE)
        return experts_TE[:, : record.places].contiguous()


class HashRouter(TopKRouter):
    """Chooses the experts with the largest hashes of token id, layer and expert."""

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Choose independently of the scores."""
        experts = self.record.experts
        key = (HASH, context.layer)
        drawn_TE = chance(context.rows.ids_T, range(experts), key).to(scores_TE.dtype)
        return select(drawn_TE, self.record.top_k, valid_T=context.valid_T)


class RoundRobinRouter(TopKRouter):
    """Chooses the next K experts for each token of the step, or random ones with ``skew``."""

    record: RoundRobin

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Choose independently of the scores."""
        top_k = self.record.top_k
        experts = self.record.experts
        skew = self.record.skew
        if skew:
            token_T = context.rows.token_T
            key = (SKEW, context.layer)
            first_1 = torch.zeros_like(token_T[:1])
            odds_1E = chance(first_1, range(experts), key, 0)
            drawn_TE = chance(token_T, range(experts), key, 1)
            # Away from 0, whose logarithm is infinite.
            odds_1E = odds_1E.to(scores_TE.dtype).clamp_min_(2.0**-17)
            drawn_TE = drawn_TE.to(scores_TE.dtype).clamp_min_(2.0**-17)
            # Gumbel-max trick: the top of log-odds plus Gumbel noise is a draw by the odds.
            log_odds_1E = torch.special.ndtri(odds_1E) * skew
            drawn_TE = log_odds_1E - drawn_TE.log().neg_().log_()
            return select(drawn_TE, top_k, valid_T=context.valid_T)
        place_K = torch.arange(top_k, device=scores_TE.device)
        chosen_TK = (context.rows.token_T[:, None] * top_k + place_K) % experts
        valid_T = context.valid_T
        return chosen_TK if valid_T is None else chosen_TK.where(valid_T[:, None], experts)
