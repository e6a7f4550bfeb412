"""Scores for the choice of experts, probabilities for loss terms, and weights of chosen experts.

T token rows, E experts, K experts per token. All are differentiable with respect to the logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.kernels.fused import uses_triton
from moefold.kernels.routing import balance
from moefold.kernels.routing import fused as kernels
from moefold.moe.config import Router


def scores(logits_TE: Tensor, record: Router) -> Tensor:
    """Return the scores [T, E] by which experts are chosen, in the logits' dtype.

    With ``topk_first``, where the score follows the choice, they are the logits.
    """
    return logits_TE if record.order == "topk_first" else score(logits_TE, record)


def score(logits: Tensor, record: Router) -> Tensor:
    """Return the scores of logits, of any experts of each row."""
    match record.score:
        case "softmax":
            return logits.softmax(1)
        case "sigmoid":
            return _apply_padded(torch.sigmoid, logits)
        case "sqrt_softplus":
            # The lower bound keeps the gradient finite where softplus underflows.
            soft = _apply_padded(F.softplus, logits)
            return soft.clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def _apply_padded(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function, padded so that results do not depend on the element count.

    On a CPU torch computes the elements after the last full vector by another formula.
    """
    padding = -values.numel() % 32  # two vectors of the widest CPU, as torch steps
    if padding == 0 or values.device.type != "cpu":
        return function(values)
    padded = F.pad(values.flatten(), (0, padding))
    return function(padded)[: values.numel()].view_as(values)


def probabilities(logits_TE: Tensor, scores_TE: Tensor, record: Router) -> Tensor:
    """Return each row's distribution over all experts: softmax, or scores divided by their sum."""
    if record.order == "topk_first":
        scores_TE = score(logits_TE, record)
    if record.score == "softmax":
        return scores_TE
    if uses_triton(scores_TE) and scores_TE.dtype == torch.float32:
        return balance.normalised(scores_TE)
    total_T1 = scores_TE.sum(1, keepdim=True)
    return scores_TE / total_T1.clamp(min=torch.finfo(scores_TE.dtype).tiny)


def weights(scores_TE: Tensor, experts_TK: Tensor, record: Router) -> Tensor:
    """Return the weights [T, K] of the chosen experts, differentiable in the scores.

    With ``topk_first`` they are the scores of the chosen experts' logits; a softmax of these sums
    to 1, so ``renormalise`` and ``epsilon`` have no effect on it. The sentinel E gets an arbitrary
    finite weight.
    """
    fused = record.order == "score_first" or record.softmax_over_chosen
    fused = fused and uses_triton(scores_TE) and scores_TE.dtype == torch.float32
    if fused and not record.floor:
        plain = kernels.NORMALISED if record.renormalise else kernels.UNCHANGED
        rule = kernels.SOFTMAX if record.softmax_over_chosen else plain
        return kernels.routing_weights(scores_TE, experts_TK, rule, record.epsilon, record.scale)
    weights_TK = scores_TE.gather(1, experts_TK.clamp(max=scores_TE.shape[1] - 1))
    if record.order == "topk_first":
        weights_TK = score(weights_TK, record)
    if record.renormalise and not record.softmax_over_chosen:
        total_T1 = weights_TK.sum(1, keepdim=True)
        total_T1 = total_T1.clamp(min=record.floor) if record.floor else total_T1
        weights_TK = weights_TK / (total_T1 + record.epsilon if record.epsilon else total_T1)
    return weights_TK if record.scale == 1.0 else weights_TK * record.scale
